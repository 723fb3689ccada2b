// How long to wait before one connects again: not at all, then longer each time, and nobody as long as his neighbour.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <utility>

namespace pagewire::detail {

// Pauses between attempts: none, then up to 50 ms, doubled each time, up to 2 s. Each is drawn from its upper half, so that
// clients which lost one server at one moment do not all come back at another.
class Backoff {
  public:
    using Milliseconds = std::chrono::milliseconds;

    // `chance`: uniform in [0, 1).
    explicit Backoff(std::function<double()> chance = from_the_system()) : chance_(std::move(chance)) {}

    // The pause before the attempt that is due.
    Milliseconds next() {
        const Milliseconds pause = next_;
        next_ = std::min(std::max(first, 2 * pause), longest);
        return drawn(pause);
    }

    // A connection was good: the next attempt is a first one.
    void reset() { next_ = Milliseconds(0); }

    // First and longest pause for libzmq, which tries again by itself where nobody listens.
    std::pair<Milliseconds, Milliseconds> own_retries() { return {drawn(first), drawn(longest)}; }

  private:
    static constexpr Milliseconds first{50}, longest{2000};

    static std::function<double()> from_the_system() {
        return [engine = std::minstd_rand(std::random_device{}())]() mutable {
            return std::uniform_real_distribution<double>()(engine);
        };
    }

    Milliseconds drawn(Milliseconds pause) const {
        return Milliseconds(static_cast<Milliseconds::rep>(static_cast<double>(pause.count()) * (0.5 + 0.5 * chance_())));
    }

    std::function<double()> chance_;
    Milliseconds next_{0};
};

}  // namespace pagewire::detail
