"""Reports: terminal tables, HTML pages, timelines for Perfetto."""
