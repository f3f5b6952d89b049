"""Skip DEQs (Pal, Edelman and Rackauckas 2022)."""
