#include <iostream>

#include <pagewire/client.hpp>

int main() {
    try {
        pagewire::Client client = pagewire::connect();  // your newest server on this machine, or connect("tcp://…")
        pagewire::Options options;
        options.max_tokens = 32;
        options.temperature = 0;
        pagewire::Stream stream = client.chat({{"user", "Why is the sky blue?"}}, options);
        for (const pagewire::Chunk& chunk : stream) std::cout << chunk.text << std::flush;
        const pagewire::Result result = stream.result();
        std::cout << "\n" << result.finish_reason << ": " << result.usage.completion << " tokens, seed " << result.seed
                  << std::endl;
    } catch (const pagewire::Error& error) {
        std::cerr << error.code() << ": " << error.what() << std::endl;
        return 1;
    }
}
