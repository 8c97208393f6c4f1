// How llama.cpp's OpenMP threads wait.
#pragma once

namespace kindred::cli {

// Starts this process again with OMP_WAIT_POLICY=passive, unless that is set: libgomp reads its environment
// when it is loaded, before main(), so there is no other way to choose. Spinning threads of several workers
// on the same cores cost more than they save. Call before anything else; returns if there is nothing to do.
void make_openmp_wait_passively();

}  // namespace kindred::cli
