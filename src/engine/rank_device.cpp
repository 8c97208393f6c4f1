#include "engine/rank_device.h"

#include <ggml-backend-impl.h>
#include <ggml-cpu.h>

#include <memory>
#include <mutex>
#include <string_view>

#include "base/log.h"
#include "engine/expert_ranks.h"
#include "engine/rank_claims.h"
#include "engine/rank_compute.h"

namespace kindred::engine {
namespace {

constexpr const char* kName = "kindred expert ranks";

ggml_backend_dev_t rank_device();

// --- buffers: one RankArena per rank; rank 0's is where ggml believes the tensors to be ---

struct RankBuffer {
  ExpertRanks& ranks;
  std::vector<RankArena>& arenas;
};

RankBuffer& buffer_of(ggml_backend_buffer_t buffer) { return *static_cast<RankBuffer*>(buffer->context); }

const ExpertRanks::Weights& weights_of(const ggml_tensor* tensor) {
  return *static_cast<const ExpertRanks::Weights*>(tensor->extra);
}

void free_buffer(ggml_backend_buffer_t buffer) { const std::unique_ptr<RankBuffer> owned(&buffer_of(buffer)); }

void* buffer_base(ggml_backend_buffer_t buffer) { return buffer_of(buffer).arenas[0].at(0); }

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src != nullptr) {
    tensor->extra = tensor->view_src->extra;
    return GGML_STATUS_SUCCESS;
  }
  const ExpertRanks::Weights* weights = buffer_of(buffer).ranks.add_weights(*tensor, buffer_of(buffer).arenas);
  // ggml hands it back with the tensor; nothing is written through it.
  tensor->extra = const_cast<ExpertRanks::Weights*>(weights);
  return weights == nullptr ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), size);
  buffer_of(buffer).ranks.write(weights_of(tensor), offset, bytes);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) {
  const std::vector<std::byte> bytes(size, std::byte{value});
  buffer_of(buffer).ranks.write(weights_of(tensor), offset, bytes);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset, size_t size) {
  buffer_of(buffer).ranks.read(weights_of(tensor), offset, {static_cast<std::byte*>(data), size});
}

// Arenas begin as zeros, and nothing clears weights later.
void clear_buffer(ggml_backend_buffer_t /*buffer*/, uint8_t /*value*/) {}

constexpr ggml_backend_buffer_i kBuffer = {
    .free_buffer = free_buffer,
    .get_base = buffer_base,
    .init_tensor = init_tensor,
    .memset_tensor = memset_tensor,
    .set_tensor = set_tensor,
    .get_tensor = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor = nullptr,
    .clear = clear_buffer,
    .reset = nullptr,
};

// --- buffer type: one per ExpertRanks ---

const char* type_name(ggml_backend_buffer_type_t /*type*/) { return kName; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  ExpertRanks& ranks = ranks_of(type);
  auto arenas = ranks.reserve(size);
  if (!arenas) return nullptr;
  auto context = std::unique_ptr<RankBuffer>(new RankBuffer{ranks, **arenas});
  return ggml_backend_buffer_init(type, kBuffer, context.release(), size);
}

// Whole pages, so that a moved expert of whole pages leaves nothing behind.
size_t alignment(ggml_backend_buffer_type_t /*type*/) { return RankArena::page_bytes(); }

bool not_host(ggml_backend_buffer_type_t /*type*/) { return false; }

// --- backend: one per llama_context ---

RankCompute& compute_of(ggml_backend_t backend) { return *static_cast<RankCompute*>(backend->context); }

const char* backend_name(ggml_backend_t /*backend*/) { return kName; }

void free_backend(ggml_backend_t backend) {
  const std::unique_ptr<ggml_backend> owned(backend);
  const std::unique_ptr<RankCompute> compute(&compute_of(backend));
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    const Status done = compute_of(backend).compute(*graph);
    if (done.ok()) return GGML_STATUS_SUCCESS;
    Logger("expert ranks").error("{}", done.error().message);
  } catch (const std::exception& e) {
    Logger("expert ranks").error("{}", e.what());
  }
  return GGML_STATUS_FAILED;
}

constexpr ggml_backend_i kBackend = {
    .get_name = backend_name,
    .free = free_backend,
    .set_tensor_async = nullptr,
    .get_tensor_async = nullptr,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async = nullptr,
    .synchronize = nullptr,
    .graph_plan_create = nullptr,
    .graph_plan_free = nullptr,
    .graph_plan_update = nullptr,
    .graph_plan_compute = nullptr,
    .graph_compute = graph_compute,
    .event_record = nullptr,
    .event_wait = nullptr,
    .graph_optimize = nullptr,
};

ggml_guid_t backend_guid() {
  static ggml_guid guid = {0x4b, 0x69, 0x6e, 0x64, 0x72, 0x65, 0x64, 0x20, 0x72, 0x61, 0x6e, 0x6b, 0x73, 0x00, 0x00, 1};
  return &guid;
}

void set_threads(ggml_backend_t backend, int threads) {
  compute_of(backend).set_threads(static_cast<uint32_t>(threads));
}

// --- device and registration ---

const char* device_name(ggml_backend_dev_t /*device*/) { return kName; }

void device_memory(ggml_backend_dev_t /*device*/, size_t* free, size_t* total) { *free = *total = 0; }

// Computes beside the CPU backend in the CPU's memory, as BLAS does.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t /*device*/) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = kName;
  props->type = device_type(device);
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char* /*params*/) {
  auto compute = std::make_unique<RankCompute>();
  const ggml_backend made{backend_guid(), kBackend, device, compute.release()};  // free_backend deletes both
  return std::make_unique<ggml_backend>(made).release();
}

// Activations stay in the CPU's memory, so they need no copies at the borders.
ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t /*device*/) { return ggml_backend_cpu_buffer_type(); }

bool supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor* op) { return rank_claims(*op); }

bool supports_buft(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t type) {
  return is_rank_buffer_type(type) || ggml_backend_buft_is_host(type);
}

constexpr ggml_backend_device_i kDevice = {
    .get_name = device_name,
    .get_description = device_name,
    .get_memory = device_memory,
    .get_type = device_type,
    .get_props = device_props,
    .init_backend = init_backend,
    .get_buffer_type = device_buffer_type,
    .get_host_buffer_type = nullptr,
    .buffer_from_host_ptr = nullptr,
    .supports_op = supports_op,
    .supports_buft = supports_buft,
    .offload_op = nullptr,
    .event_new = nullptr,
    .event_free = nullptr,
    .event_synchronize = nullptr,
};

const char* registry_name(ggml_backend_reg_t /*registry*/) { return kName; }

size_t device_count(ggml_backend_reg_t /*registry*/) { return 1; }

ggml_backend_dev_t device_at(ggml_backend_reg_t /*registry*/, size_t /*index*/) { return rank_device(); }

void* proc_address(ggml_backend_reg_t /*registry*/, const char* name) {
  if (std::string_view(name) == "ggml_backend_set_n_threads") return reinterpret_cast<void*>(set_threads);
  return nullptr;
}

// ggml keeps pointers to both for as long as the process lives. They hold functions and no state.
ggml_backend_reg_t rank_registry() {
  static ggml_backend_reg registry = {GGML_BACKEND_API_VERSION,
                                      {.get_name = registry_name,
                                       .get_device_count = device_count,
                                       .get_device = device_at,
                                       .get_proc_address = proc_address},
                                      nullptr};
  return &registry;
}

ggml_backend_dev_t rank_device() {
  static ggml_backend_device device = {kDevice, rank_registry(), nullptr};
  return &device;
}

}  // namespace

ggml_backend_buffer_type* make_rank_buffer_type(ExpertRanks& ranks) {
  static std::once_flag once;
  std::call_once(once, [] { ggml_backend_register(rank_registry()); });
  const ggml_backend_buffer_type_i interface = {.get_name = type_name,
                                                .alloc_buffer = alloc_buffer,
                                                .get_alignment = alignment,
                                                .get_max_size = nullptr,
                                                .get_alloc_size = nullptr,
                                                .is_host = not_host};
  return std::make_unique<ggml_backend_buffer_type>(ggml_backend_buffer_type{interface, rank_device(), &ranks})
      .release();
}

void free_rank_buffer_type(ggml_backend_buffer_type* type) {
  const std::unique_ptr<ggml_backend_buffer_type> owned(type);
}

bool is_rank_buffer_type(const ggml_backend_buffer_type* type) {
  return type != nullptr && type->iface.alloc_buffer == alloc_buffer;
}

ExpertRanks& ranks_of(const ggml_backend_buffer_type* type) { return *static_cast<ExpertRanks*>(type->context); }

}  // namespace kindred::engine
