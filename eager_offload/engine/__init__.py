"""The transfers of one device, called by eager code and by compiled graphs."""
