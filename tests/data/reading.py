"""Data of files and by value, read for a test as a run reads them."""

from functools import partial

from tilth.config.schema import DataConfig
from tilth.data.columns import RecordError
from tilth.data.formats import tried_records
from tilth.data.pairs import read_pairs
from tilth.data.prompts import load_source, texts_of
from tilth.data.sources import read_documents

load_pairs = partial(load_source, read=read_pairs)


def read_records(source):
    """(place, record) of each record of files. Raises the error of one that cannot be read."""
    for where, record in tried_records(source):
        if isinstance(record, RecordError):
            raise record
        yield where, record


def pair_records(records, columns=None):
    """The pairs of records by value."""
    return load_pairs(DataConfig(columns=columns or {}), {"source": records}).source


def load_texts(data, **how):
    """The documents to train on, and those held out."""
    train, held = load_source(data, read=read_documents, **how).split(data.holdout)
    return texts_of(train), texts_of(held)
