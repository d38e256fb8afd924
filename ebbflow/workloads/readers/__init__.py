"""Readers of rows and samples from files, folders and buckets."""

from ebbflow.workloads.readers.datasets import DatasetWorkload
from ebbflow.workloads.readers.files import ImageFolder, MosaicShards, ParquetRows, TarShards

__all__ = ["DatasetWorkload", "ImageFolder", "MosaicShards", "ParquetRows", "TarShards"]
