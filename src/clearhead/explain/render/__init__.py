"""Pages of worked steps, written down: text, Markdown, HTML, LaTeX and the terminal."""
