"""What did other frameworks write down? One file a framework, and what brings their records into our form.

A reader takes a file and what is known of the model, and yields `Record`s as it goes along the file.
"""
