#include "sim/kernel_data.h"

#include <fmt/format.h>

#include <filesystem>
#include <initializer_list>

#include "sim/text_file.h"

namespace kindred::sim {
namespace {

constexpr double kMostUs = 1e9;

Result<CsvTable> open_kernel_table(const std::string& folder, const std::string& name) {
  for (const char* ending : {".csv", ".csv.xz"}) {
    const std::string path = (std::filesystem::path(folder) / (name + ending)).string();
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) continue;
    Result<std::string> text = read_text(path);
    if (!text) return std::move(text).error();
    return CsvTable::parse(*std::move(text), path);
  }
  return Error{ErrorCode::kNotFound, fmt::format("{}: neither {}.csv nor {}.csv.xz is there", folder, name, name)};
}

// The cells of one row by column name; the first error sticks.
class RowReader {
 public:
  RowReader(const CsvTable& table, std::initializer_list<const char*> names) : table_(table) {
    for (const char* name : names) {
      const Result<size_t> column = table.column(name);
      if (!column && status.ok()) status = column.error();
      columns_.push_back(column ? *column : 0);
    }
  }

  Status status;

  void go_to(size_t row) {
    row_ = row;
    next_ = 0;
  }
  std::string text() { return std::string(table_.cell(row_, columns_[next_++])); }
  uint32_t whole() { return take(table_.whole(row_, columns_[next_++], 0)); }
  double us() { return take(table_.number(row_, columns_[next_++], 1e-6, kMostUs)); }

 private:
  template <class T>
  T take(Result<T> result) {
    if (result) return *result;
    if (status.ok()) status = std::move(result).error();
    return T{};
  }

  const CsvTable& table_;
  std::vector<size_t> columns_;
  size_t row_ = 0, next_ = 0;
};

template <class Row, class Read>
Status read_rows(const std::string& folder, const char* file, std::initializer_list<const char*> names,
                 std::vector<Row>& rows, Read read) {
  Result<CsvTable> table = open_kernel_table(folder, file);
  if (!table) return std::move(table).error();
  RowReader reader(*table, names);
  for (size_t row = 0; row < table->rows() && reader.status.ok(); ++row) {
    reader.go_to(row);
    read(reader, rows);
  }
  return reader.status;
}

}  // namespace

Result<KernelData> load_kernels(const std::string& folder) {
  KernelData data;
  Status read = read_rows(folder, "moe_kernels",
                          {"gpu", "framework", "version", "model", "dtype", "kernel", "distribution", "top_k",
                           "experts", "ep_size", "tokens", "latency_us"},
                          data.moe, [](RowReader& from, std::vector<MoeRow>& rows) {
                            MoeRow row;
                            for (std::string* text : {&row.gpu, &row.framework, &row.version, &row.model, &row.dtype,
                                                      &row.kernel, &row.distribution}) {
                              *text = from.text();
                            }
                            for (uint32_t* number : {&row.top_k, &row.experts, &row.ranks, &row.tokens}) {
                              *number = from.whole();
                            }
                            row.us = from.us();
                            rows.push_back(std::move(row));
                          });
  if (!read) return std::move(read).error();
  read = read_rows(
      folder, "h200_decode_attention",
      {"batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size", "latency_us"},
      data.attention, [](RowReader& from, std::vector<AttentionRow>& rows) {
        AttentionRow row;
        row.requests = from.whole();
        row.context = from.whole();
        row.context += from.whole();
        for (uint32_t* number : {&row.heads, &row.kv_heads, &row.head_dim, &row.window}) {
          *number = from.whole();
        }
        row.us = from.us();
        rows.push_back(row);
      });
  if (!read) return std::move(read).error();
  read = read_rows(folder, "h200_gemm_bf16", {"m", "n", "k", "latency_us"}, data.gemm,
                   [](RowReader& from, std::vector<GemmRow>& rows) {
                     GemmRow row;
                     for (uint32_t* number : {&row.m, &row.n, &row.k}) *number = from.whole();
                     row.us = from.us();
                     rows.push_back(row);
                   });
  if (!read) return std::move(read).error();
  read = read_rows(
      folder, "h200_deepep_low_latency",
      {"node_num", "hidden_size", "num_token", "num_topk", "num_experts", "dispatch_avg_t_us", "combine_avg_t_us"},
      data.all_to_all, [](RowReader& from, std::vector<AllToAllRow>& rows) {
        AllToAllRow row;
        const uint32_t nodes = from.whole();
        for (uint32_t* number : {&row.hidden, &row.tokens, &row.top_k, &row.experts}) {
          *number = from.whole();
        }
        row.dispatch_us = from.us();
        row.combine_us = from.us();
        if (nodes == 1) rows.push_back(row);
      });
  if (!read) return std::move(read).error();
  return data;
}

}  // namespace kindred::sim
