"""What the stored bytes are: header, layout, codec, objects, checksum."""
