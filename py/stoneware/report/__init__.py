"""The report: what samples say about kernels, as numbers (measures.py) and as a page (page.py)."""
