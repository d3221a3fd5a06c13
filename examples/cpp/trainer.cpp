// trainer.cpp: the trainer of examples/c in C++17, with gradients that travel in 8 bits.
//
// Usage: trainer STORE DATA RANK, as there. Handles are closed by destructors, failures are exceptions.
#include <pyps.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Error : std::runtime_error {
    Error(const char *what, int code)
        : std::runtime_error(std::string(what) + ": " + pyps_error_name(code) + ": " + pyps_error_message()),
          code(code) {}
    int code;
};

void must(int code, const char *what) {
    if (code != PYPS_OK) throw Error(what, code);
}

struct Close {
    void operator()(pyps_store *store) const { pyps_close(store); }
};
using Store = std::unique_ptr<pyps_store, Close>;

Store open(const std::string &name) {
    pyps_store *store = nullptr;
    must(pyps_open(name.c_str(), PYPS_ABI, &store), "open");
    return Store(store);
}

struct Data {
    std::int32_t rows = 0, columns = 0;
    std::vector<float> values; // label and features of each row

    explicit Data(const std::string &path) {
        std::ifstream file(path, std::ios::binary);
        file.read(reinterpret_cast<char *>(&rows), sizeof rows);
        file.read(reinterpret_cast<char *>(&columns), sizeof columns);
        if (!file || rows <= 0 || columns <= 0)
            throw std::runtime_error(path + ": expected rows and columns");
        values.resize(static_cast<std::size_t>(rows) * (columns + 1));
        file.read(reinterpret_cast<char *>(values.data()), values.size() * sizeof(float));
        if (!file) throw std::runtime_error(path + ": ends too early");
    }
    const float *row(std::uint64_t index) const { return &values[index % rows * (columns + 1)]; }
};

void add_gradient(const Data &data, const float *sample, const std::vector<float> &weights, float *gradient) {
    float sum = weights[data.columns];
    for (int c = 0; c < data.columns; c++) sum += weights[c] * sample[1 + c];
    const float error = 1 / (1 + std::exp(-sum)) - sample[0];
    for (int c = 0; c < data.columns; c++) gradient[c] += error * sample[1 + c];
    gradient[data.columns] += error;
}

// Pushes the claim's mean gradient and has the new weights come back in the same pass.
void step(pyps_store *store, const Data &data, const pyps_claim &claim, std::vector<float> &weights) {
    std::uint32_t staging = 0;
    must(pyps_stage(store, -1, &staging), "stage");
    float *gradient = pyps_staging(store, staging);
    std::fill(gradient, gradient + data.columns + 1, 0.0f);
    for (std::uint64_t i = 0; i < claim.count; i++)
        add_gradient(data, data.row(claim.first + i), weights, gradient);
    pyps_hyper hyper{};
    hyper.lr = 0.5f, hyper.weight_decay = 1e-4f;
    pyps_push_args push{};
    push.size = sizeof push, push.staging = staging, push.samples = claim.count;
    push.scale = 1.0f / static_cast<float>(claim.count), push.timeout_seconds = -1, push.hyper = &hyper;
    push.codec = PYPS_INT8, push.error_feedback = 1;
    pyps_push_result result{};
    std::uint64_t version = 0;
    const int code = pyps_exchange(store, &push, weights.data(), &result, &version);
    if (code != PYPS_EREJECTED) must(code, "exchange");
    else must(pyps_pull(store, weights.data(), &version), "pull");
}

int train(const std::string &name, const Data &data, int rank) {
    Store store = open(name);
    pyps_layout layout{};
    must(pyps_get_layout(store.get(), &layout), "layout");
    std::vector<float> weights(layout.flat_elements);
    std::uint64_t version = 0;
    must(pyps_join(store.get(), PYPS_WORKER, rank, nullptr), "join");
    must(pyps_pull(store.get(), weights.data(), &version), "pull");
    for (int steps = 0;; steps++) {
        try {
            pyps_claim claim{};
            const int code = pyps_start(store.get(), -1, &claim);
            if (code == PYPS_EEND) return steps;
            must(code, "start");
            step(store.get(), data, claim, weights);
        } catch (const Error &error) { // too late for the others: its samples went back
            if (error.code != PYPS_EFENCED) throw;
            must(pyps_rejoin(store.get()), "rejoin");
            must(pyps_pull(store.get(), weights.data(), &version), "pull");
        }
    }
}

} // namespace

int main(int argc, char **argv) try {
    if (argc != 4) {
        std::cerr << "usage: trainer STORE DATA RANK\n";
        return 2;
    }
    std::cout << "rank " << argv[3] << ": " << train(argv[1], Data(argv[2]), std::atoi(argv[3]))
              << " steps\n";
    return 0;
} catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 1;
}
