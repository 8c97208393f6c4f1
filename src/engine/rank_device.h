// The ggml device through which llama.cpp reaches the expert ranks.
//
// ggml keeps one list of devices per process, so the device is registered once and has no state: what it works
// on hangs on the buffer type of the weights, one per ExpertRanks. A context of a model without ranks gets a
// backend of it too, which then claims nothing.
//
// Thread-safety: as ggml's: buffers and backends belong to their callers. The first call must not run beside
// the making of a context or the loading of a model, since ggml's list has no lock.
#pragma once

struct ggml_backend_buffer_type;

namespace kindred::engine {

class ExpertRanks;

// Registers the device at the first call. `ranks` must outlive the type, and the type all its buffers.
ggml_backend_buffer_type* make_rank_buffer_type(ExpertRanks& ranks);
void free_rank_buffer_type(ggml_backend_buffer_type* type);
bool is_rank_buffer_type(const ggml_backend_buffer_type* type);
ExpertRanks& ranks_of(const ggml_backend_buffer_type* type);

}  // namespace kindred::engine
