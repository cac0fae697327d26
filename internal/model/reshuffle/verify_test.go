// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

func newVerifier(t *testing.T, model string, p *Permutation, full bool) *verifier {
	t.Helper()
	c, err := checkpoint.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	m, err := newMapping(c, p)
	if err != nil {
		t.Fatal(err)
	}
	return &verifier{c, m, full}
}

// TestVerifyDetectsWrongOrder verifies the input as if it were the output, and the output of another permutation.
func TestVerifyDetectsWrongOrder(t *testing.T) {
	for name, generate := range generators {
		m := generate(21)
		p, other := m.permutation(m.layers...), m.permutation(m.layers[0])
		model := m.write(t, 100)
		wrong := filepath.Join(t.TempDir(), "wrong")
		mustRun(t, Options{Model: model, Permutation: other, Out: wrong})
		for _, dir := range []string{model, wrong} {
			for _, full := range []bool{false, true} {
				if _, err := newVerifier(t, model, p, full).verify(t.Context(), dir, 2); err == nil {
					t.Errorf("%s, full %v: no error", name, full)
				}
			}
		}
	}
}

// TestLargeFusedTensors has rows that are copied one by one inside the kernel, and a tensor of which a run without full
// verification compares only the beginning of each row. That is enough to detect two exchanged rows.
func TestLargeFusedTensors(t *testing.T) {
	m := generators["gpt_oss"](4)
	const name = "model.layers.1.mlp.experts.gate_up_proj"
	m.add(name, "BF16", testExperts, 1<<10, 800)
	p := m.permutation(0, 1)
	model := m.write(t, 20)
	out := filepath.Join(t.TempDir(), "out")
	mustRun(t, Options{Model: model, Permutation: p, Out: out})
	sameTensors(t, expected(m.tensors, p), readAll(t, out))

	c, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	shard, _ := c.Shard(name)
	tensor := shard.Tensors[name]
	if tensor.End-tensor.Begin <= smallGather {
		t.Fatal("the tensor is not large")
	}
	data := readAll(t, out)[name].data
	row := len(data) / testExperts
	file, err := os.OpenFile(shard.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for to, from := range map[int]int{3: 8, 8: 3} {
		if _, err := file.WriteAt(data[from*row:(from+1)*row], shard.DataStart()+tensor.Begin+int64(to*row)); err != nil {
			t.Fatal(err)
		}
	}
	_, err = newVerifier(t, model, p, false).verify(t.Context(), out, 2)
	if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "row 3") {
		t.Errorf("got %v, want an error that names the tensor and the row", err)
	}
}
