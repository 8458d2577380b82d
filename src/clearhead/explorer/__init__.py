"""The explorer: attention in the browser, every number the library's own."""
