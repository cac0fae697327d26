// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/base64"
	"slices"
	"testing"
)

// FuzzRoutedExperts decodes and renumbers any text, in pieces of any size. The result has an ID for every four bytes.
// The editor accepts the same texts as the decoder, keeps the length, and changes each ID as requested.
func FuzzRoutedExperts(f *testing.F) {
	f.Add(base64.StdEncoding.EncodeToString(make([]byte, 32)), 2, 2, 3)
	f.Add(base64.StdEncoding.EncodeToString(make([]byte, 31)), 2, 2, 1)
	f.Add("QUJD\nREVG", 1, 1, 4)
	f.Add("!", 1, 1, 1)
	f.Add("", 0, 0, 1)
	f.Fuzz(func(t *testing.T, text string, layers, top, pieceBytes int) {
		if layers < 0 || layers > 1<<12 || top < 0 || top > 1<<12 || pieceBytes < 1 {
			return
		}
		ids, err := decodeRoutedExperts(text, layers, top)
		if err == nil && (4*len(ids) > len(text) || len(ids)%(layers*top) != 0) {
			t.Fatalf("%d ids from %d bytes, %d layers, %d experts", len(ids), len(text), layers, top)
		}
		editor := renumberRoutedExperts(layers, top, func(layer int, id int32) int32 { return id + int32(layer) + 1 })
		var edited []byte
		var editErr error
		for piece := range slices.Chunk([]byte(text), pieceBytes) {
			if edited, editErr = editor.Edit(edited, piece); editErr != nil {
				return
			}
		}
		if edited, editErr = editor.End(edited); editErr != nil {
			return
		}
		if err != nil || len(edited) != len(text) {
			t.Fatalf("%q becomes %q; the decoder returns error %v", text, edited, err)
		}
		got, err := decodeRoutedExperts(string(edited), layers, top)
		if err != nil || len(got) != len(ids) {
			t.Fatalf("%q becomes %q: %v", text, edited, err)
		}
		for i, id := range ids {
			if want := id + int32(i/top%layers) + 1; got[i] != want {
				t.Fatalf("id %d is %d, want %d", i, got[i], want)
			}
		}
	})
}
