// One mapping for each memfd of this process, however often it is mapped. ThreadSanitizer knows memory by its address:
// between two mappings of the same bytes it sees no race. So ranks of the shm backend that are threads reach each
// other's memory at the addresses at which its owner has it, and nothing else of the backend changes.
//
// Linked with -Wl,--wrap=mmap -Wl,--wrap=munmap. A mapping that is shared is writable, for peers too.
#pragma once

// How many mappings there are, one for each file; and how many calls of mmap() were given one that was there.
int shared_mappings();
int mapped_again();
