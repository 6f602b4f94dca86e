"""Who else can read our traces? One file a form; `trimtab.trace.formats` reads all of them back."""
