// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/embeddings"
	"github.com/semmoe/operator/internal/model/npy"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/trace"
)

// NumbersVar defines a flag of comma-separated numbers. Its help shows the default in command-line syntax, or no
// default if there is none. The usage contains the name of the value in backquotes.
func NumbersVar(f *pflag.FlagSet, to *[]float64, name string, value []float64, usage string) {
	f.Float64SliceVar(to, name, value, usage)
	texts := make([]string, len(value))
	for i, v := range value {
		texts[i] = strconv.FormatFloat(v, 'g', -1, 64)
	}
	f.Lookup(name).DefValue = strings.Join(texts, ",")
}

// NonDefault returns a function that reports whether a flag is set to a value other than its default. An explicit
// default is allowed even if the flag does not apply.
func NonDefault(cmd *cobra.Command) func(name string) bool {
	return func(name string) bool {
		flag := cmd.Flags().Lookup(name)
		return flag.Changed && flag.Value.String() != flag.DefValue
	}
}

// ListOf joins names for the help of a flag.
func ListOf[T ~string](values []T) string {
	names := make([]string, len(values))
	for i, v := range values {
		names[i] = string(v)
	}
	return strings.Join(names, ", ")
}

// HardwareFlag adds the flag --hardware.
func HardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", hardware.Default, "hardware profile: a built-in name ("+strings.Join(hardware.Names(), ", ")+") or a file written by semmoe-lab fit")
}

// MaxInputBytes is the maximum size of a JSON input file, such as a config.json. The largest known files have less than
// 1 MiB. Parsing needs up to 100 times the file size in memory.
const MaxInputBytes = 4 << 20

// maxProfileBytes is the maximum size of a hardware profile; the built-in one has 12 KiB.
const maxProfileBytes = 1 << 20

// ReadHardware returns the profile of --hardware: a single word is a built-in name, anything else a file.
func ReadHardware(named string) (*hardware.Profile, error) {
	if !strings.ContainsAny(named, "/.") {
		p, err := hardware.BuiltIn(named)
		if err != nil {
			return nil, UsageErrorf("--hardware: %w; a file name is also allowed", err)
		}
		return p, nil
	}
	text, err := regularfile.Read(named, maxProfileBytes)
	if err != nil {
		return nil, InputError(fmt.Errorf("--hardware: %w", err))
	}
	p, err := hardware.Parse(text)
	if err != nil {
		return nil, codedError{fmt.Errorf("--hardware: %s: %w", named, err), ExitInvalidFile}
	}
	return p, nil
}

// maxEmbedding is the maximum size of an embedding; each prompt becomes a point of this size. The largest known models
// have 16,384.
const maxEmbedding = 1 << 15

// OpenEmbeddings reads the embeddings of a vocabulary: a .npy file, or the token embeddings of the checkpoint in a
// directory.
func OpenEmbeddings(ctx context.Context, path string) (*embedding.Table, error) {
	m, err := openMatrix(ctx, path)
	if err != nil {
		return nil, InputError(fmt.Errorf("--embeddings: %w", err))
	}
	if m.Columns > maxEmbedding {
		return nil, codedError{fmt.Errorf("--embeddings: %s: has %d numbers in each row; allowed are up to %d", path, m.Columns, maxEmbedding), ExitInvalidFile}
	}
	return &embedding.Table{Tokens: m.Rows, Size: m.Columns, Values: m.Values}, nil
}

func openMatrix(ctx context.Context, path string) (*npy.Matrix, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return embeddings.Extract(ctx, path, "")
	}
	return npy.Open(path)
}

// CheckEmbeddings returns an error for embeddings of a different vocabulary than the trace's.
func CheckEmbeddings(table *embedding.Table, vocabulary int) error {
	if table != nil && table.Tokens != vocabulary {
		return codedError{fmt.Errorf("--embeddings: %d rows; the trace's vocabulary is %d", table.Tokens, vocabulary), ExitInvalidFile}
	}
	return nil
}

// WriteTrace writes a trace to the file of --out.
func WriteTrace(out string, t *trace.Trace) error {
	err := atomicfile.Write(out, 0o644, func(w io.Writer) error { return trace.WriteAs(w, out, t) })
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	return nil
}
