"""Parts of bench/product.py."""
