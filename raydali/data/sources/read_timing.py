"""The import path of `reading` in pipelines of version 0.2.0."""

from raydali.data.sources.reading import reading as reading
