"""A decoder that does not fit a chip as several programs that follow each other. Source: docs/transformer.md, Parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coral.codegen.errors import ShapeError
from coral.codegen.transformer.graph import Transformer
from coral.codegen.transformer.model import Cache
from coral.codegen.transformer.plan import Form
from coral.codegen.transformer.program import TransformerProgram


@dataclass(frozen=True)
class Part:
    """The program of the layers from ``first`` on."""

    program: TransformerProgram
    first: int

    def of(self, cache: Cache) -> Cache:
        """This part's layers of the whole model's cache, not copied."""
        own = slice(self.first, self.first + len(self.program.model.blocks))
        return Cache(cache.keys[own], cache.values[own])


def parts(model: Transformer, form: Form) -> list[Part]:
    """One program if the model fits, else several with as many layers each as fit.

    What one gives is what the next takes. Each needs the whole chip, so several cannot ``keep`` or ``loop``, whatever
    the form says, and keys and values are always reported. ShapeError, with the numbers, if a layer alone does not fit.
    """
    try:
        return [Part(TransformerProgram(model, form), 0)]
    except ShapeError as error:
        if len(model.blocks) == 1:
            raise
        problem = error
    found, first, layers = [], 0, len(model.blocks)
    while first < layers:
        program: TransformerProgram | None = None
        for end in range(first + 1, layers + 1):
            last = end == layers
            own = Form(spread=form.spread, report=form.report, logits=form.logits and last)
            piece = replace(model, name=f"{model.name}_{first}", blocks=model.blocks[first:end])
            piece = piece if own.logits else replace(piece, classifier=None)
            try:
                program = TransformerProgram(piece, own)
            except ShapeError as error:
                problem = error
                break
        if program is None:
            raise ShapeError(f"layer {first} alone does not fit: {problem}") from problem
        found.append(Part(program, first))
        first += len(program.model.blocks)
    return found


def fitting(model: Transformer, form: Form, least: int = 256) -> Transformer:
    """The model with as long a context as ``parts`` have room for, halved until it is below ``least`` positions.

    ShapeError of the whole context if nothing helps.
    """
    problem: ShapeError | None = None
    context = model.geometry.context
    while problem is None or context >= least:
        shorter = replace(model, geometry=replace(model.geometry, context=context))
        try:
            parts(shorter, form)
        except ShapeError as error:
            problem, context = problem or error, context // 2
        else:
            return shorter
    raise problem
