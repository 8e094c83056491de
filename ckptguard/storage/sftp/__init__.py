"""Storage over SFTP."""
