"""The tolerances of the fuzzer: how far correct results may be from the truth, and why."""

NORM_SLACK = 1 + 2e-5  # norms are taken in at least float32, where the sum of 231 squares has a smaller relative error

# A state is returned in its own dtype, half a spacing away from the float32 numbers whose residual was measured. An
# evaluation in a batch of another size (compaction) may round differently by another spacing.
STATE_SPACINGS = 2.0

# A solver cannot know the rounding of the cell, |f in its dtype - f in float64| at the returned state. It is measured, and
# doubled because another evaluation may round in the other direction.
CELL_ROUNDING = 2.0

# Products with J' are computed in the cell's dtype, each with an error of a few spacings of |J| |u|. The adjoint solve stops
# at its tolerance or at 8 spacings, whichever is larger. Both errors are multiplied by |(I - J)^{-1}|.
ADJOINT_SPACINGS = 24.0

# Spacings do not shrink below the normal numbers: sums of up to 33 * 7 terms are off by this many of the smallest ones.
SUBNORMALS = 512.0

CONDITION = 1e8  # condition number beyond which float64 has too few digits for the dense solution
TOLD_SLACK = 1e-3  # share by which a reported residual may differ from the measured one, besides rounding
GROWTH = 2.1  # growth of a state since its start that is reported; the library uses 2, in its own dtype

# Gradients by steps are compared in double precision, where rounding of a few hundred products is far below this share.
STEPS_SLACK = 1e-6
