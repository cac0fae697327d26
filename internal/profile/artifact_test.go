// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/artifact"
)

func TestID(t *testing.T) {
	s := Sampling{Requests: 2000, Tokens: 200000, RequestTokens: 512}
	id := ID("model", "dataset", s)
	// A changed ID repeats every existing profile. Only a new Format may change it.
	if id != "a2abf3ca413e28dc" {
		t.Errorf("the ID changed to %s", id)
	}
	if err := (artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: id}).Validate(); err != nil {
		t.Error(err)
	}
	for name, other := range map[string]string{
		"model":          ID("modem", "dataset", s),
		"data set":       ID("model", "datasets", s),
		"requests":       ID("model", "dataset", Sampling{1, 200000, 512}),
		"tokens":         ID("model", "dataset", Sampling{2000, 1, 512}),
		"request tokens": ID("model", "dataset", Sampling{2000, 200000, 1}),
	} {
		if other == id {
			t.Errorf("another %s has the same ID", name)
		}
	}
}

func TestManifestValidate(t *testing.T) {
	digest := artifact.Digest(strings.Repeat("0a", 32))
	good := func() Manifest {
		return Manifest{Format: Format, ModelDigest: "m", DatasetDigest: "d", Files: map[string]artifact.Digest{TraceFile: digest, CountsFile: digest}}
	}
	scope := artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: good().ID()}
	for name, tc := range map[string]struct {
		change func(*Manifest)
		want   string
	}{
		"good":          {func(*Manifest) {}, ""},
		"tokenizer":     {func(m *Manifest) { m.Files[TokenizerFile] = digest }, ""},
		"format":        {func(m *Manifest) { m.Format = "semmoe-profile/2" }, `"semmoe-profile/2"`},
		"other inputs":  {func(m *Manifest) { m.DatasetDigest = "e" }, "the inputs have the ID"},
		"no counts":     {func(m *Manifest) { delete(m.Files, CountsFile) }, "lists no file counts.safetensors.zst"},
		"broken digest": {func(m *Manifest) { m.Files[TokenizerFile] = "x" }, "tokenizer.json"},
	} {
		m := good()
		tc.change(&m)
		err := m.validate(scope)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}
