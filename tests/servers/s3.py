"""How tests reach an S3 server: by options of their own and by boto's client, past the code under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class S3Server:
    """Where an S3 server listens, and who may use it."""

    endpoint: str
    key: str
    secret: str

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for ``s3://`` URLs."""
        return {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"s3": {"addressing_style": "path"}, "connect_timeout": 5, "read_timeout": 20},
        }

    def client(self) -> Any:
        """boto's own client."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )
