// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// writeHeaders writes a checkpoint of DeepSeek-V3's shape. Its shards have headers, and sparse holes instead of
// weights: layers times experts times three projections, with the given suffixes.
func writeHeaders(t testing.TB, layers, experts, shards int, suffixes ...string) (dir string, tensors int) {
	t.Helper()
	dir = t.TempDir()
	config := fmt.Sprintf(`{"model_type":"deepseek_v3","num_hidden_layers":%d,"n_routed_experts":%d,"num_experts_per_tok":8,"hidden_size":64,"vocab_size":512,"n_group":1,"topk_group":1}`, layers, experts)
	writeFile(t, filepath.Join(dir, configFile), []byte(config))
	names := make([][]string, shards)
	add := func(name string) {
		names[tensors%shards] = append(names[tensors%shards], name)
		tensors++
	}
	for layer := range layers {
		prefix := fmt.Sprintf("model.layers.%d.", layer)
		add(prefix + "mlp.gate.weight")
		for expert := range experts {
			for _, projection := range []string{"gate_proj", "up_proj", "down_proj"} {
				for _, suffix := range suffixes {
					add(fmt.Sprintf("%smlp.experts.%d.%s.%s", prefix, expert, projection, suffix))
				}
			}
		}
	}
	index, err := os.Create(filepath.Join(dir, indexFile))
	if err != nil {
		t.Fatal(err)
	}
	out := bufio.NewWriter(index)
	fmt.Fprint(out, `{"metadata":{"total_size":0},"weight_map":{`)
	separator := ""
	for i, list := range names {
		file := fmt.Sprintf("model-%05d-of-%06d.safetensors", i+1, shards)
		header := []byte("{")
		for j, name := range list {
			fmt.Fprintf(out, "%s%q:%q", separator, name, file)
			separator = ","
			header = fmt.Appendf(header, `%q:{"dtype":"BF16","shape":[%d,64],"data_offsets":[%d,%d]},`, name, experts, j*experts*128, (j+1)*experts*128)
		}
		header[len(header)-1] = '}'
		path := filepath.Join(dir, file)
		writeFile(t, path, append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...))
		if err := os.Truncate(path, int64(8+len(header)+len(list)*experts*128)); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Fprint(out, "}}")
	if err := out.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := index.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, tensors
}

// TestInspectMemory checks the memory per tensor of an opened checkpoint. It determines the memory that the
// largest known checkpoints need.
func TestInspectMemory(t *testing.T) {
	dir, tensors := writeHeaders(t, 6, 256, 16, "weight", "weight_scale", "weight_scale_2", "input_scale", "weight_offset", "weight_zero_point")
	heap := func() uint64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := heap()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// 276,600 tensors are inspected in less than 256 MiB, of which the index takes 30 MiB while it is read.
	if each := int(heap()-before) / tensors; each > 320 {
		t.Errorf("%d bytes for each of %d tensors", each, tensors)
	}
	if err := c.CheckPermutable(); err != nil {
		t.Error(err)
	}
}
