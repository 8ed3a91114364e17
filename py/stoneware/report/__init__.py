"""The report: measured speed of kernels, as numbers (measures.py) and as a page (page.py)."""
