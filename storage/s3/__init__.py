"""S3: requests, uploads in parts, and the fast client."""
