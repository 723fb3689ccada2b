// The running servers of this user and machine, as `pagewire serve` records them; and files of keys.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "errors.hpp"

namespace pagewire {

// Keys of CURVE, ZeroMQ's own encryption and authentication: texts of 40 characters in Z85.
struct CurveKeys {
    std::string server_key;  // the server's public key
    std::string public_key;
    std::string secret_key;

    // Our own keys from the file that `pagewire keys curve new` makes. Throws ConfigError.
    static CurveKeys load(const std::string& server_key, const std::string& key_file);
};

namespace detail {

// The text or number under `key` in a flat JSON object, as this project's own programs write them.
inline std::optional<std::string> json_value(const std::string& json, const std::string& key) {
    const std::string quoted = '"' + key + '"';
    std::size_t at = json.find(quoted), colon = at;
    while (at != std::string::npos) {
        colon = json.find_first_not_of(" \t\r\n", at + quoted.size());
        if (colon != std::string::npos && json[colon] == ':') break;
        at = json.find(quoted, at + 1);  // it was a value
    }
    if (at == std::string::npos) return std::nullopt;
    at = json.find_first_not_of(" \t\r\n", colon + 1);
    if (at == std::string::npos) return std::nullopt;
    if (json[at] != '"') return json.substr(at, json.find_first_of(",}", at) - at);
    std::string out;
    for (++at; at < json.size() && json[at] != '"'; ++at) {
        if (json[at] == '\\') ++at;
        if (at < json.size()) out.push_back(json[at]);
    }
    return out;
}

inline std::string read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

inline bool is_private(const std::string& folder) {
    struct stat status {};
    return lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == getuid() &&
           (status.st_mode & 077) == 0;
}

// `$XDG_RUNTIME_DIR/pagewire` where the session has such a folder, else `pagewire-<user id>` among temporary files.
inline std::string private_folder() {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    std::string folder;
    if (runtime != nullptr && runtime[0] == '/' && is_private(runtime)) folder = std::string(runtime) + "/pagewire";
    else folder = (std::filesystem::temp_directory_path() / ("pagewire-" + std::to_string(getuid()))).string();
    if (std::filesystem::exists(folder) && !is_private(folder)) {
        throw ConfigError({"config", folder + " must be a folder of yours that nobody else may enter"});
    }
    return folder;
}

// Its supervisor runs: it holds the lock.
inline bool is_alive(const std::filesystem::path& folder) {
    const int lock = open((folder / "lock").c_str(), O_RDWR | O_CLOEXEC);
    if (lock < 0) return false;
    const bool is_held = flock(lock, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(lock);
    return is_held;
}

// Nobody can listen there: an ipc endpoint whose socket is missing, or was left behind by a server that died.
inline bool is_refused(const std::string& url) {
    sockaddr_un address{};
    if (url.rfind("ipc://", 0) != 0 || url.size() - 6 >= sizeof address.sun_path) return false;
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, url.c_str() + 6, url.size() - 6);
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const int code = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
    close(probe);
    return code == ENOENT || code == ECONNREFUSED;
}

// Where the newest server of this user is reached. Throws ConnectionLost: there is none.
inline std::string find_url() {
    const std::string base = private_folder();
    std::string found;
    double newest = -1;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(base, ignored)) {
        if (!entry.is_directory(ignored) || !is_alive(entry.path())) continue;
        const std::string record = read_file(entry.path() / "server.json");
        const auto url = json_value(record, "url"), started = json_value(record, "started");
        if (!url || !started || std::strtod(started->c_str(), nullptr) <= newest) continue;
        newest = std::strtod(started->c_str(), nullptr), found = *url;
    }
    if (!found.empty()) return found;
    const std::string url = "ipc://" + base + "/server.sock";
    if (is_refused(url)) {
        throw ConnectionLost({"connection_lost",
                              "no server of yours runs on this machine; start one with `pagewire serve`, or give its URL"});
    }
    return url;
}

}  // namespace detail

inline CurveKeys CurveKeys::load(const std::string& server_key, const std::string& key_file) {
    const std::string text = detail::read_file(key_file);
    const auto public_key = detail::json_value(text, "public"), secret_key = detail::json_value(text, "secret");
    if (!public_key || !secret_key) {
        throw ConfigError({"config", key_file + " is no file of `pagewire keys curve new`", "key_file"});
    }
    return {server_key, *public_key, *secret_key};
}

}  // namespace pagewire
