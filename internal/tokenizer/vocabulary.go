package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// fileVocabulary are the ids of the model's tokens as they are written. Like the merges it is read without reflection: a
// real vocabulary has 150,000 of both, and reflection makes twice the allocations of them.
type fileVocabulary map[string]int32

// fileMerges are pairs of tokens as they are written, the first to be merged first. A pair is written as "a b" or, by newer
// versions, as ["a", "b"].
type fileMerges [][2]string

// UnmarshalJSON reads an object of numbers.
func (v *fileVocabulary) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	if text[0] != '{' {
		return fmt.Errorf("vocab is %.20s; an object of ids is wanted", text)
	}
	*v = make(fileVocabulary, bytes.Count(text, []byte(":")))
	s := valueScanner{text: text, at: 1}
	for s.next() != '}' {
		written, err := s.string()
		if err != nil {
			return err
		}
		s.next()
		digits := s.scalar()
		id, err := strconv.ParseInt(digits, 10, 32)
		if err != nil {
			return fmt.Errorf("token %q has id %.20s; allowed is 0 to %d", written, digits, maxTokenID)
		}
		(*v)[written] = int32(id)
	}
	return nil
}

// UnmarshalJSON reads an array of pairs.
func (m *fileMerges) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	if text[0] != '[' {
		return fmt.Errorf("merges is %.20s; an array is wanted", text)
	}
	*m = make(fileMerges, 0, bytes.Count(text, []byte("\n"))+1)
	s := valueScanner{text: text, at: 1}
	for s.next() != ']' {
		pair, err := s.pair()
		if err != nil {
			return fmt.Errorf("merge %d: %w", len(*m), err)
		}
		*m = append(*m, pair)
	}
	return nil
}

// valueScanner goes through the members of an object or array that is known to be valid JSON.
type valueScanner struct {
	text []byte
	at   int
}

// next skips what stands between values and returns the first byte of what follows.
func (s *valueScanner) next() byte {
	for {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\r', '\n', ',', ':':
			s.at++
		default:
			return c
		}
	}
}

// string reads a string.
func (s *valueScanner) string() (string, error) {
	if s.next() != '"' {
		return "", fmt.Errorf("%.20s is not a string", s.text[s.at:])
	}
	begin, escaped := s.at, false
	for s.at++; s.text[s.at] != '"'; s.at++ {
		if s.text[s.at] == '\\' {
			escaped = true
			s.at++
		}
	}
	s.at++
	if !escaped {
		return string(s.text[begin+1 : s.at-1]), nil
	}
	var read string
	err := json.Unmarshal(s.text[begin:s.at], &read)
	return read, err
}

// scalar returns the text up to the end of a number or word.
func (s *valueScanner) scalar() string {
	begin := s.at
	for strings.IndexByte(", \t\r\n}]", s.text[s.at]) < 0 {
		s.at++
	}
	return string(s.text[begin:s.at])
}

// pair reads one merge.
func (s *valueScanner) pair() (pair [2]string, err error) {
	if s.next() == '"' {
		joined, err := s.string()
		if err != nil {
			return pair, err
		}
		left, right, ok := strings.Cut(joined, " ")
		if !ok || strings.Contains(right, " ") {
			return pair, fmt.Errorf("%q does not have two parts", joined)
		}
		return [2]string{left, right}, nil
	}
	if s.text[s.at] != '[' {
		return pair, fmt.Errorf("%.20s is neither a string nor an array", s.text[s.at:])
	}
	s.at++
	parts := 0
	for ; s.next() != ']'; parts++ {
		part, err := s.string()
		if err != nil {
			return pair, err
		}
		if parts < len(pair) {
			pair[parts] = part
		}
	}
	s.at++
	if parts != len(pair) {
		return pair, fmt.Errorf("an array of %d does not have two parts", parts)
	}
	return pair, nil
}
