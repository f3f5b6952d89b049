"""Reports that compare our measurements with published figures, and verdicts on the papers' claims."""
