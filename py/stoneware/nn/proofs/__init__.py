"""Proves what a module of another package computes, by a trace of its code.

A module is traced with torch.fx in training and in eval mode, with and without gradients, a norm also with and without
torch.autocast. All traces must be equal, and each of their operations must be one of the function to be proved. Control
flow that depends on a tensor, an activation, a clamp, a bias, a dropout or a scale that the function lacks therefore
ends the proof.

    norm_proof.py         RMSNorm
    swiglu_proof.py       feed-forwards of three layers: down(silu(gate(x)) * up(x))
    mlp_proof.py          feed-forwards of two layers: down(activation(up(x)))
    pointwise.py          the activation between the two layers, which an epilogue must be able to have
    experts_proof.py      experts of transformers, by the digest of their code
    equal_modules.py      one proof for all equal modules of a model
    tracer.py             the trace of a module in all modes
    attribute_reads.py    which attributes the traced code reads, and whether they can change later
    fx_nodes.py           what the nodes of a trace compute
    recorder.py           compares a call on tensors with the trace
    no_proof.py           the error of a proof that fails
"""

from stoneware.nn.proofs.attribute_reads import is_same
from stoneware.nn.proofs.equal_modules import Proofs
from stoneware.nn.proofs.experts_proof import experts
from stoneware.nn.proofs.mlp_proof import MLPParts, mlp
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.norm_proof import rms_norm
from stoneware.nn.proofs.recorder import checked_call, operations
from stoneware.nn.proofs.swiglu_proof import SwiGLUParts, swiglu

__all__ = [
    "MLPParts",
    "NoProof",
    "Proofs",
    "SwiGLUParts",
    "checked_call",
    "experts",
    "is_same",
    "mlp",
    "operations",
    "rms_norm",
    "swiglu",
]
