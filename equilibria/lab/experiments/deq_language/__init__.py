"""DEQs on sequences (Bai, Kolter and Koltun 2019)."""
