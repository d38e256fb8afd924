"""`python -m cost catalogue refresh`: the shipped tables of instance types, prices and bands, anew from AWS."""
