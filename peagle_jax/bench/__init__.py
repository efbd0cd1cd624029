"""Speed of decoding, measured side by side: methods of this package and other engines."""
