// Times llama.cpp's decode attention: one query token over a cache of keys and values.
//
// The tensors are laid out as llama.cpp lays out the cache of one layer, and the graph is the one
// its models build with flash attention on: keys and values are [head_dim, kv_heads, tokens] views
// of a [kv_heads · head_dim, tokens] tensor, permuted; the mask is f16; accumulation is asked for
// in f32. Every answer is compared with attention in f64 over the dequantized keys and values.
//
// Prints one JSON object per line and case.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

template <auto function>
struct Free {
    template <typename T>
    void operator()(T *value) const { function(value); }
};

using Context = std::unique_ptr<ggml_context, Free<ggml_free>>;
using Backend = std::unique_ptr<ggml_backend, Free<ggml_backend_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer_free>>;
using Threads = std::unique_ptr<ggml_threadpool, Free<ggml_threadpool_free>>;

struct Cache {
    const char *name;
    ggml_type type;
    // Largest relative error accepted. Keys of f16 meet a query of f16 and values are added up in
    // f16, whose error grows with the number of tokens; quantized keys meet a query of q8_0, and
    // values are added up in f32.
    double tolerance;
};

constexpr Cache CACHES[] = {
    {"f16", GGML_TYPE_F16, 0.05},
    {"q8_0", GGML_TYPE_Q8_0, 0.02},
    {"q4_0", GGML_TYPE_Q4_0, 0.02},
};

struct Options {
    std::vector<int64_t> tokens{1024, 4096, 32768};
    std::vector<std::pair<int64_t, int64_t>> heads{{32, 32}, {32, 8}, {9, 3}};
    std::vector<int64_t> head_dims{64, 128};
    std::vector<Cache> caches{std::begin(CACHES), std::end(CACHES)};
    int threads = 2;
    double seconds = 1.0;             // per case, after the warm-up
    int64_t working_set = 128 << 20;  // bytes that consecutive calls go through
};

struct Case {
    int64_t tokens, query_heads, kv_heads, head_dim;
    Cache cache;
};

// xorshift64*, uniform in [-√3, √3): mean 0, variance 1.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL | 1) {}

    float next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        const uint32_t bits = static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1dULL) >> 40);
        return (static_cast<float>(bits) * 0x1p-23f - 1.0f) * 1.7320508f;
    }

  private:
    uint64_t state_;
};

void fill(ggml_tensor *tensor, Random &random) {
    const int64_t columns = tensor->ne[0];
    const size_t row_size = ggml_row_size(tensor->type, columns);
    std::vector<float> row(columns);
    std::vector<uint8_t> packed(row_size);
    for (int64_t r = 0; r < ggml_nrows(tensor); r++) {
        std::generate(row.begin(), row.end(), [&] { return random.next(); });
        // Converts to f32 and f16, too.
        ggml_quantize_chunk(tensor->type, row.data(), packed.data(), 0, 1, columns, nullptr);
        ggml_backend_tensor_set(tensor, packed.data(), r * row_size, row_size);
    }
}

std::vector<float> dequantized(const ggml_tensor *tensor) {
    std::vector<uint8_t> packed(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, packed.data(), 0, packed.size());
    std::vector<float> values(ggml_nelements(tensor));
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(values.data(), packed.data(), packed.size());
        return values;
    }
    ggml_get_type_traits(tensor->type)->to_float(packed.data(), values.data(), values.size());
    return values;
}

// The graph of one layer's attention over its own copy of keys and values.
struct Layer {
    ggml_tensor *keys, *values;  // [kv_heads · head_dim, tokens]
    ggml_tensor *output;         // [head_dim, query_heads, 1]
    ggml_cgraph *graph;
};

Layer build(ggml_context *context, const Case &c, ggml_tensor *query, ggml_tensor *mask) {
    Layer layer;
    const int64_t width = c.kv_heads * c.head_dim;
    const auto cached = [&](ggml_tensor *&tensor) {
        tensor = ggml_new_tensor_2d(context, c.cache.type, width, c.tokens);
        ggml_tensor *view = ggml_view_3d(context, tensor, c.head_dim, c.kv_heads, c.tokens,
                                         ggml_row_size(c.cache.type, c.head_dim),
                                         ggml_row_size(c.cache.type, width), 0);
        return ggml_permute(context, view, 0, 2, 1, 3);
    };
    ggml_tensor *q = ggml_permute(context, query, 0, 2, 1, 3);
    ggml_tensor *k = cached(layer.keys);
    ggml_tensor *v = cached(layer.values);
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    layer.output = ggml_flash_attn_ext(context, q, k, v, mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(layer.output, GGML_PREC_F32);
    layer.graph = ggml_new_graph_custom(context, 8, false);
    ggml_build_forward_expand(layer.graph, layer.output);
    return layer;
}

// ‖output − expected‖ / ‖expected‖ of one query head, expected computed in f64.
double head_error(const Case &c, int64_t head, const std::vector<float> &query,
                  const std::vector<float> &keys, const std::vector<float> &values,
                  const std::vector<float> &output) {
    const int64_t width = c.kv_heads * c.head_dim;
    const int64_t column = head / (c.query_heads / c.kv_heads) * c.head_dim;
    std::vector<double> weights(c.tokens);
    double maximum = -INFINITY;
    for (int64_t t = 0; t < c.tokens; t++) {
        double dot = 0;
        for (int64_t d = 0; d < c.head_dim; d++) {
            dot += static_cast<double>(query[head * c.head_dim + d]) * keys[t * width + column + d];
        }
        weights[t] = dot / std::sqrt(static_cast<double>(c.head_dim));
        maximum = std::max(maximum, weights[t]);
    }
    double sum = 0;
    for (double &weight : weights) {
        weight = std::exp(weight - maximum);
        sum += weight;
    }
    double difference = 0, norm = 0;
    for (int64_t d = 0; d < c.head_dim; d++) {
        double expected = 0;
        for (int64_t t = 0; t < c.tokens; t++) {
            expected += weights[t] / sum * values[t * width + column + d];
        }
        difference += std::pow(output[head * c.head_dim + d] - expected, 2);
        norm += expected * expected;
    }
    return std::sqrt(difference / norm);
}

// The larger error of the first and the last query head.
double relative_error(const Case &c, const Layer &layer, const ggml_tensor *query) {
    const std::vector<float> q = dequantized(query), k = dequantized(layer.keys);
    const std::vector<float> v = dequantized(layer.values), o = dequantized(layer.output);
    const double first = head_error(c, 0, q, k, v, o);
    const double last = head_error(c, c.query_heads - 1, q, k, v, o);
    // Not std::max, which drops a NaN.
    return first > last || std::isnan(first) ? first : last;
}

void compute(ggml_backend *backend, const Layer &layer) {
    if (ggml_backend_graph_compute(backend, layer.graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the graph was not computed");
    }
}

void measure(const Case &c, const Options &options, ggml_backend *backend) {
    const int64_t width = c.kv_heads * c.head_dim;
    const int64_t bytes = 2 * c.tokens * static_cast<int64_t>(ggml_row_size(c.cache.type, width));
    const int64_t copies = std::max<int64_t>(1, (options.working_set + bytes - 1) / bytes);

    const size_t per_copy = 8 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false);
    const Context context(ggml_init({(copies + 1) * per_copy, nullptr, true}));
    if (!context) {
        throw std::runtime_error("no memory for the graphs");
    }
    ggml_tensor *query =
        ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, c.head_dim, c.query_heads, 1);
    ggml_tensor *mask = ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, c.tokens, 1);
    std::vector<Layer> layers;
    for (int64_t copy = 0; copy < copies; copy++) {
        layers.push_back(build(context.get(), c, query, mask));
    }
    const Buffer buffer(ggml_backend_alloc_ctx_tensors(context.get(), backend));
    if (!buffer) {
        throw std::runtime_error("no memory for " + std::to_string(copies) + " caches of " +
                                 std::to_string(bytes) + " bytes");
    }
    Random random(1);
    fill(query, random);
    ggml_backend_tensor_memset(mask, 0, 0, ggml_nbytes(mask));  // nothing is masked
    for (const Layer &layer : layers) {
        fill(layer.keys, random);
        fill(layer.values, random);
    }

    // One round to warm up, then at least five calls and at least one round.
    for (const Layer &layer : layers) {
        compute(backend, layer);
    }
    std::vector<double> milliseconds;
    const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
    const size_t least = std::max<size_t>(5, layers.size());
    while (milliseconds.size() < least || Clock::now() < end) {
        const Layer &layer = layers[milliseconds.size() % layers.size()];
        const auto start = Clock::now();
        compute(backend, layer);
        const std::chrono::duration<double, std::milli> elapsed = Clock::now() - start;
        milliseconds.push_back(elapsed.count());
    }
    const auto middle = milliseconds.begin() + milliseconds.size() / 2;
    std::nth_element(milliseconds.begin(), middle, milliseconds.end());
    const double minimum = *std::min_element(milliseconds.begin(), milliseconds.end());

    const double error = relative_error(c, layers.back(), query);
    std::printf("{\"tokens\":%lld,\"query_heads\":%lld,\"kv_heads\":%lld,\"head_dim\":%lld,"
                "\"cache\":\"%s\",\"threads\":%d,\"milliseconds\":%.6g,"
                "\"minimum_milliseconds\":%.6g,\"repetitions\":%zu,\"bytes\":%lld,\"copies\":%lld,"
                "\"relative_error\":%.3g}\n",
                static_cast<long long>(c.tokens), static_cast<long long>(c.query_heads),
                static_cast<long long>(c.kv_heads), static_cast<long long>(c.head_dim),
                c.cache.name, options.threads, *middle, minimum, milliseconds.size(),
                static_cast<long long>(bytes), static_cast<long long>(copies), error);
    std::fflush(stdout);
    if (!(error <= c.cache.tolerance)) {
        throw std::runtime_error("a relative error of " + std::to_string(error) + ", above " +
                                 std::to_string(c.cache.tolerance));
    }
}

std::vector<std::string> split(const std::string &text, char separator) {
    std::vector<std::string> parts{""};
    for (const char c : text) {
        if (c == separator) {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

// A whole number from 1 to 2^40.
int64_t number(const std::string &text) {
    char *end = nullptr;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < 1 || value > (1LL << 40)) {
        throw std::invalid_argument("not a positive number: '" + text + "'");
    }
    return value;
}

std::vector<int64_t> numbers(const std::string &text) {
    std::vector<int64_t> values;
    for (const std::string &part : split(text, ',')) {
        values.push_back(number(part));
    }
    return values;
}

std::vector<std::pair<int64_t, int64_t>> heads(const std::string &text) {
    std::vector<std::pair<int64_t, int64_t>> values;
    for (const std::string &part : split(text, ',')) {
        const std::vector<std::string> pair = split(part, '/');
        if (pair.size() != 2 || number(pair[0]) % number(pair[1]) != 0) {
            throw std::invalid_argument("not query heads/kv heads: '" + part + "'");
        }
        values.emplace_back(number(pair[0]), number(pair[1]));
    }
    return values;
}

std::vector<Cache> caches(const std::string &text) {
    std::vector<Cache> values;
    for (const std::string &part : split(text, ',')) {
        const auto *cache = std::find_if(std::begin(CACHES), std::end(CACHES),
                                         [&](const Cache &known) { return part == known.name; });
        if (cache == std::end(CACHES)) {
            throw std::invalid_argument("no cache type '" + part + "': f16, q8_0, q4_0");
        }
        values.push_back(*cache);
    }
    return values;
}

Options parse(int count, char **arguments) {
    Options options;
    for (int i = 1; i < count; i += 2) {
        const std::string name = arguments[i];
        if (i + 1 == count) {
            throw std::invalid_argument("no value for '" + name + "'");
        }
        const std::string value = arguments[i + 1];
        if (name == "--tokens") {
            options.tokens = numbers(value);
        } else if (name == "--heads") {
            options.heads = heads(value);
        } else if (name == "--head-dim") {
            options.head_dims = numbers(value);
        } else if (name == "--cache") {
            options.caches = caches(value);
        } else if (name == "--threads") {
            options.threads = static_cast<int>(std::min<int64_t>(number(value), 512));
        } else if (name == "--milliseconds") {
            options.seconds = static_cast<double>(number(value)) / 1000.0;
        } else if (name == "--working-set") {
            options.working_set = number(value);
        } else {
            throw std::invalid_argument("unknown option '" + name + "'");
        }
    }
    return options;
}

void run(const Options &options) {
    const Backend backend(ggml_backend_cpu_init());
    ggml_threadpool_params parameters = ggml_threadpool_params_default(options.threads);
    const Threads threads(ggml_threadpool_new(&parameters));
    if (!backend || !threads) {
        throw std::runtime_error("no CPU backend");
    }
    ggml_backend_cpu_set_n_threads(backend.get(), options.threads);
    ggml_backend_cpu_set_threadpool(backend.get(), threads.get());
    for (const auto &[query_heads, kv_heads] : options.heads) {
        for (const int64_t head_dim : options.head_dims) {
            for (const int64_t tokens : options.tokens) {
                for (const Cache &cache : options.caches) {
                    measure({tokens, query_heads, kv_heads, head_dim, cache}, options,
                            backend.get());
                }
            }
        }
    }
}

}  // namespace

int main(int count, char **arguments) {
    try {
        run(parse(count, arguments));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
