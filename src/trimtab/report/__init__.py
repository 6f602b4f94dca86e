"""Show it: terminal tables, a page for the browser, timelines for Perfetto."""
