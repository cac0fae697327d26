// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// fileVocabulary maps the model's tokens, as written in the file, to ids. Vocabulary and merges are parsed without
// reflection: a real vocabulary has 150,000 entries of each, and reflection needs twice as many allocations.
type fileVocabulary map[string]int32

// fileMerges lists pairs of tokens as written in the file, in order of rank. A pair is written as "a b" or, in newer
// versions, as ["a", "b"].
type fileMerges [][2]string

// UnmarshalJSON parses an object of numbers.
func (v *fileVocabulary) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	if text[0] != '{' {
		return fmt.Errorf("vocab is %.20s; it must be an object of ids", text)
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

// UnmarshalJSON parses an array of pairs.
func (m *fileMerges) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	if text[0] != '[' {
		return fmt.Errorf("merges is %.20s; it must be an array", text)
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

// valueScanner iterates over the members of an object or array. The text must be valid JSON.
type valueScanner struct {
	text []byte
	at   int
}

// next skips separators and returns the first byte of the next value.
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

// string parses a string.
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

// scalar returns the text of a number or literal.
func (s *valueScanner) scalar() string {
	begin := s.at
	for strings.IndexByte(", \t\r\n}]", s.text[s.at]) < 0 {
		s.at++
	}
	return string(s.text[begin:s.at])
}

// pair parses one merge.
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
