"""How good an index is: R@K, AR, RSUM and ANN recall, with intervals, tables and a page."""
