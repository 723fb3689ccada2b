// Values in one canonical text, made of JSON (as the golden vectors have it) or of MessagePack, so that they can be compared.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <msgpack/unpack.hpp>

namespace test {

inline std::string hex(const std::string& bytes) {
    std::string out = "h'";
    char digits[3];
    for (const char byte : bytes) {
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
        out += digits;
    }
    return out + "'";
}

inline std::string unhex(const std::string& text) {
    std::string out;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
        out.push_back(static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16)));
    }
    return out;
}

inline std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", value);
    return text;
}

inline std::string object(const std::map<std::string, std::string>& items) {
    std::string out = "{";
    for (const auto& [key, value] : items) out += key + ":" + value + ",";
    return out + "}";
}

struct Json {
    enum class Kind { null, boolean, number, text, array, object } kind = Kind::null;
    std::string text;  // of a number as it stands there
    std::vector<Json> items;
    std::map<std::string, Json> fields;

    const Json& operator[](const std::string& name) const {
        static const Json none;
        const auto found = fields.find(name);
        return found == fields.end() ? none : found->second;
    }

    std::string canonical() const {
        if (kind == Kind::text) return '"' + text + '"';
        if (kind == Kind::number) {
            return text.find_first_of(".eE") == std::string::npos ? text : number(std::strtod(text.c_str(), nullptr));
        }
        if (kind == Kind::array) {
            std::string out = "[";
            for (const Json& item : items) out += item.canonical() + ",";
            return out + "]";
        }
        if (kind != Kind::object) return text;
        if (fields.size() == 1 && fields.count("hex") != 0) return hex(unhex((*this)["hex"].text));
        if (fields.size() == 1 && fields.count("int") != 0) return (*this)["int"].text;
        std::map<std::string, std::string> out;
        if (fields.size() == 1 && fields.count("map") != 0) {
            for (const Json& pair : (*this)["map"].items) out[pair.items[0].canonical()] = pair.items[1].canonical();
        } else {
            for (const auto& [name, item] : fields) out['"' + name + '"'] = item.canonical();
        }
        return object(out);
    }
};

class Parser {
  public:
    explicit Parser(std::string text) : text_(std::move(text)) {}

    Json parse() {
        Json out;
        switch (peek()) {
            case '{':
                out.kind = Json::Kind::object;
                list('}', [&] {
                    const std::string name = string();
                    expect(':');
                    out.fields[name] = parse();
                });
                break;
            case '[':
                out.kind = Json::Kind::array;
                list(']', [&] { out.items.push_back(parse()); });
                break;
            case '"':
                out.kind = Json::Kind::text, out.text = string();
                break;
            default:
                while (at_ < text_.size() && std::string(",]} \n").find(text_[at_]) == std::string::npos) out.text += text_[at_++];
                out.kind = out.text == "null"                            ? Json::Kind::null
                           : out.text == "true" || out.text == "false" ? Json::Kind::boolean
                                                                         : Json::Kind::number;
        }
        return out;
    }

  private:
    char peek() {
        at_ = text_.find_first_not_of(" \n", at_);
        if (at_ == std::string::npos) throw std::runtime_error("JSON ends early");
        return text_[at_];
    }
    void expect(char c) {
        if (peek() != c) throw std::runtime_error("no JSON");
        ++at_;
    }
    template <typename Item>
    void list(char end, Item item) {
        ++at_;
        if (peek() == end) return void(++at_);
        for (;;) {
            item();
            if (peek() == end) return void(++at_);
            expect(',');
        }
    }
    std::string string() {
        expect('"');
        std::string out;
        for (; text_[at_] != '"'; ++at_) {
            if (text_[at_] != '\\') {
                out += text_[at_];
                continue;
            }
            const char c = text_[++at_];
            if (c == 'u') {  // of these vectors: control characters only
                out += static_cast<char>(std::strtol(text_.substr(at_ + 1, 4).c_str(), nullptr, 16));
                at_ += 4;
            } else {
                out += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
            }
        }
        ++at_;
        return out;
    }

    std::string text_;
    std::size_t at_ = 0;
};

inline std::string canonical(const msgpack::object& value) {
    switch (value.type) {
        case msgpack::type::NIL: return "null";
        case msgpack::type::BOOLEAN: return value.via.boolean ? "true" : "false";
        case msgpack::type::POSITIVE_INTEGER: return std::to_string(value.via.u64);
        case msgpack::type::NEGATIVE_INTEGER: return std::to_string(value.via.i64);
        case msgpack::type::FLOAT32:
        case msgpack::type::FLOAT64: return number(value.via.f64);
        case msgpack::type::STR: return '"' + std::string(value.via.str.ptr, value.via.str.size) + '"';
        case msgpack::type::BIN: return hex(std::string(value.via.bin.ptr, value.via.bin.size));
        case msgpack::type::ARRAY: {
            std::string out = "[";
            for (std::uint32_t i = 0; i < value.via.array.size; ++i) out += canonical(value.via.array.ptr[i]) + ",";
            return out + "]";
        }
        case msgpack::type::MAP: {
            std::map<std::string, std::string> out;
            for (std::uint32_t i = 0; i < value.via.map.size; ++i) {
                out[canonical(value.via.map.ptr[i].key)] = canonical(value.via.map.ptr[i].val);
            }
            return object(out);
        }
        default: return "?";
    }
}

// The map of a frame.
inline std::string canonical(const std::string& frame) {
    std::size_t at = 1;
    const auto handle = msgpack::unpack(frame.data(), frame.size(), at);
    return canonical(handle.get());
}

inline std::vector<Json> vectors(const std::string& name) {
    const char* folder = std::getenv("PAGEWIRE_VECTORS");
    std::ifstream file((folder != nullptr ? std::string(folder) : std::string(PAGEWIRE_VECTORS)) + "/" + name);
    std::ostringstream text;
    text << file.rdbuf();
    const Json whole = Parser(text.str()).parse();
    if (whole["format"].text != "1") throw std::runtime_error(name + " has another format");
    return whole["vectors"].items;
}

}  // namespace test
