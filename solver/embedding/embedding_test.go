package embedding_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/embedding"
)

// npy writes a file of version 1.
func npy(header string, values ...any) []byte {
	text := header + strings.Repeat(" ", (64-(10+len(header)+1)%64)%64) + "\n"
	b := append([]byte("\x93NUMPY\x01\x00"), byte(len(text)), byte(len(text)>>8))
	b = append(b, text...)
	for _, v := range values {
		b, _ = binary.Append(b, binary.LittleEndian, v)
	}
	return b
}

func TestRead(t *testing.T) {
	want := &embedding.Table{Tokens: 2, Size: 3, Values: []float32{0, 1, -2, 0.5, 65504, 5.9604645e-08}}
	halves := []uint16{0, 0x3c00, 0xc000, 0x3800, 0x7bff, 0x0001}
	wide := npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", want.Values)
	second := append([]byte("\x93NUMPY\x02\x00"), wide[8], wide[9], 0, 0)
	for name, file := range map[string][]byte{
		"float32":   wide,
		"version 2": append(second, wide[10:]...),
		"float16":   npy("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }", halves),
		"by column": npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", []float32{0, 0.5, 1, 65504, -2, 5.9604645e-08}),
	} {
		got, err := embedding.Read(bytes.NewReader(file))
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: error %v; %s", name, err, diff)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	good := npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }", []float32{1, 2})
	for want, file := range map[string][]byte{
		"shorter than the start":         good[:7],
		"does not begin like":            append([]byte("NUMPY..."), good...),
		"version 4":                      append([]byte("\x93NUMPY\x04\x00"), good[8:]...),
		"ends in the header":             good[:40],
		"allowed as descr is <f4, <f2":   npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2), }"),
		"fortran_order must be":          npy("{'descr': '<f4', 'shape': (1, 2), }"),
		"shape must have two dimensions": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"),
		"its shape is (0, 2)":            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2), }"),
		"allowed is 1 to 16777216 each":  npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 99999999999999999999), }"),
		"values end early":               npy("{'descr': '<f4', 'fortran_order': False, 'shape': (16777216, 16777216), }", []float32{1}),
		"bytes follow":                   append(good, 0),
		"value 1 is NaN":                 npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }", []float32{1, float32(math.NaN())}),
		"value 0 is +Inf":                npy("{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1), }", uint16(0x7c00)),
	} {
		path := filepath.Join(t.TempDir(), "e.npy")
		if err := os.WriteFile(path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := embedding.Open(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }", []float32{1, 2}))
	f.Add(npy("{'descr': '<f2', 'fortran_order': True, 'shape': (2, 1), }", []uint16{1, 2}))
	f.Fuzz(func(t *testing.T, file []byte) {
		if table, err := embedding.Read(bytes.NewReader(file)); err == nil && (len(table.Values) != table.Tokens*table.Size || len(file) < 2*len(table.Values)) {
			t.Errorf("%d values of shape (%d, %d) from %d bytes", len(table.Values), table.Tokens, table.Size, len(file))
		}
	})
}

func TestPrompt(t *testing.T) {
	table := &embedding.Table{Tokens: 2, Size: 2, Values: []float32{1, 0, 0, 4}}
	for want, tokens := range map[string][]int32{"[0.5 2]": {0, 1}, "[1 0]": {0, 0, -1, 7}, "[0 0]": {9}} {
		if got := fmt.Sprint(table.Prompt(tokens)); got != want {
			t.Errorf("%v: %s; want %s", tokens, got, want)
		}
	}
}

// TestProjectionKeepsDistances compares the distances of random bags with those of their projections.
func TestProjectionKeepsDistances(t *testing.T) {
	const vocabulary = 500
	random := rand.New(rand.NewPCG(1, 1))
	table := embedding.Projected(vocabulary, 256, 1)
	if diff := cmp.Diff(table, embedding.Projected(vocabulary, 256, 1)); diff != "" {
		t.Error(diff)
	}
	for range 50 {
		var bags [2][]int32
		exact := make([]float64, vocabulary)
		for side := range bags {
			for range 300 {
				id := int32(random.IntN(vocabulary))
				bags[side] = append(bags[side], id)
				exact[id] += float64(1-2*side) / 300
			}
		}
		want, got := 0.0, 0.0
		for _, d := range exact {
			want += d * d
		}
		a, b := table.Prompt(bags[0]), table.Prompt(bags[1])
		for i := range a {
			got += float64(a[i]-b[i]) * float64(a[i]-b[i])
		}
		if got < want*0.6 || got > want*1.4 {
			t.Errorf("squared distance %v, of the bags %v", got, want)
		}
	}
}

func TestKMeansFindsPlantedClusters(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	var points [][]float32
	for i := range 120 {
		point := []float32{random.Float32() / 10, random.Float32() / 10, random.Float32() / 10}
		point[i%3]++
		points = append(points, point)
	}
	space := embedding.NewSpace(points)
	for i := range points {
		points[i] = space.Direction(points[i])
	}
	clusters := embedding.KMeans(points, 3, 1)
	names := map[int]int{}
	for i, point := range points {
		if i < 3 {
			names[clusters.Nearest(point)] = i
		}
		if name, known := names[clusters.Nearest(point)]; !known || name != i%3 {
			t.Fatalf("point %d of cluster %d is in %d", i, i%3, name)
		}
	}
	// As many clusters as different points, and fewer points than clusters, are no special cases.
	if c := embedding.KMeans([][]float32{{1, 0}, {1, 0}}, 5, 1); c.Nearest([]float32{1, 0}) < 0 {
		t.Error("no cluster")
	}
}
