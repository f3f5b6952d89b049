"""Examine equilibrium models: spectra, agreement of gradients, memory, plots, tuning, summaries and diagnosis."""

from equilibria.analysis.agreement import Agreement, gradient_agreement
from equilibria.analysis.diagnosis.diagnose import Diagnosis, diagnose
from equilibria.analysis.diagnosis.findings import Finding, Severity
from equilibria.analysis.diagnosis.layers import LayerDiagnosis
from equilibria.analysis.memory import peak_memory
from equilibria.analysis.plots import plot_spectrum, plot_steps, plot_trace
from equilibria.analysis.spectrum import (
    LargestSingularValue,
    SpectralRadius,
    dense_jacobian,
    jacobian_spectrum,
    largest_singular_value,
    spectral_radius,
)
from equilibria.analysis.tuning import tune
from equilibria.analysis.tuning_settings import Candidates, Measurement, Setting, Tuning, Tunings

__all__ = [
    "Agreement",
    "Candidates",
    "Diagnosis",
    "Finding",
    "LargestSingularValue",
    "LayerDiagnosis",
    "Measurement",
    "Setting",
    "Severity",
    "SpectralRadius",
    "Tuning",
    "Tunings",
    "dense_jacobian",
    "diagnose",
    "gradient_agreement",
    "jacobian_spectrum",
    "largest_singular_value",
    "peak_memory",
    "plot_spectrum",
    "plot_steps",
    "plot_trace",
    "spectral_radius",
    "tune",
]
