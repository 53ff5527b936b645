"""What the stored bytes are: header, codec, objects, checksum."""
