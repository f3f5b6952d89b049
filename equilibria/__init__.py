"""equilibria: deep equilibrium models in PyTorch. What is not named here is not API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibria import nn
from equilibria._core.loop import Stop
from equilibria._core.norms import euclidean_norm, max_norm, rms_norm
from equilibria._core.recording import record
from equilibria.analysis.agreement import Agreement, gradient_agreement
from equilibria.analysis.diagnosis.doctor import Diagnosis, diagnose
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
from equilibria.cells.constructions import TiedLayers, stack, weight_tied_form
from equilibria.cells.monotone import MonotoneLinear
from equilibria.cells.monotone_conv import MonotoneConv2d, MonotoneTiers2d
from equilibria.cells.splitting import ForwardBackward, PeacemanRachford, Readout, tune_alpha
from equilibria.constraints import SpectralNorm, contract_, lipschitz_ratio, project_, project_rows, spectral_norm
from equilibria.deq import DEQ, fixed_point, visit
from equilibria.explicit import Trajectory, WeightTied
from equilibria.export import export, to_onnx
from equilibria.gradients.base import Gradient, Problem, quarantine
from equilibria.gradients.escalate import Escalate
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.reversible import Reversible
from equilibria.gradients.shine import Shine
from equilibria.gradients.unrolled import Unrolled
from equilibria.gradients.warmup import Warmup
from equilibria.penalties import (
    ConstantWeights,
    ExponentialWeights,
    LinearWeights,
    PenaltySchedule,
    correction_penalty,
    jacobian_penalty,
    jitter,
    skip_penalty,
)
from equilibria.remember import Remember
from equilibria.solution import ConvergenceError, ConvergenceWarning, Handover, Solution, Stats, Status
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import Fallback
from equilibria.solvers.krylov import GMRES, BiCGSTAB, NormalCG
from equilibria.solvers.newton import Newton
from equilibria.solvers.picard import Picard
from equilibria.solvers.restart import Restart
from equilibria.solvers.steady_state import SteadyState
from equilibria.starts import FirstStep, Zeros

if TYPE_CHECKING:
    from equilibria import analysis, cells, lab, models

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "GMRES",
    "JFB",
    "Agreement",
    "Anderson",
    "BiCGSTAB",
    "Broyden",
    "Candidates",
    "ConstantWeights",
    "ConvergenceError",
    "ConvergenceWarning",
    "Diagnosis",
    "Escalate",
    "ExponentialWeights",
    "Fallback",
    "Finding",
    "FirstStep",
    "ForwardBackward",
    "Gradient",
    "Handover",
    "Implicit",
    "Iterate",
    "LargestSingularValue",
    "LayerDiagnosis",
    "LinearWeights",
    "Measurement",
    "MonotoneConv2d",
    "MonotoneLinear",
    "MonotoneTiers2d",
    "NeumannPhantom",
    "Newton",
    "NormalCG",
    "PeacemanRachford",
    "PenaltySchedule",
    "Picard",
    "Problem",
    "Readout",
    "Remember",
    "Restart",
    "Reversible",
    "Setting",
    "Severity",
    "Shine",
    "Solution",
    "Solver",
    "SpectralNorm",
    "SpectralRadius",
    "Stats",
    "Status",
    "SteadyState",
    "Stop",
    "TiedLayers",
    "Trajectory",
    "Tuning",
    "Tunings",
    "Unrolled",
    "UnrolledPhantom",
    "Warmup",
    "WeightTied",
    "Zeros",
    "analysis",
    "cells",
    "contract_",
    "correction_penalty",
    "dense_jacobian",
    "diagnose",
    "euclidean_norm",
    "export",
    "fixed_point",
    "gradient_agreement",
    "jacobian_penalty",
    "jacobian_spectrum",
    "jitter",
    "lab",
    "largest_singular_value",
    "lipschitz_ratio",
    "max_norm",
    "models",
    "nn",
    "peak_memory",
    "plot_spectrum",
    "plot_steps",
    "plot_trace",
    "project_",
    "project_rows",
    "quarantine",
    "record",
    "rms_norm",
    "skip_penalty",
    "spectral_norm",
    "spectral_radius",
    "stack",
    "to_onnx",
    "tune",
    "tune_alpha",
    "visit",
    "weight_tied_form",
]

_LAZY = {"analysis", "cells", "lab", "models"}  # packages that load on first use: they cost as much as the core does


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"equilibria.{name}")
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
