// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/inspection"
)

const (
	// exitInvalidModel is the exit code of errors that another attempt would repeat. It is used in a Job's
	// podFailurePolicy.
	exitInvalidModel = 3
	// terminationLog is the default file of a container's termination message in Kubernetes.
	terminationLog = "/dev/termination-log"
	// terminationLimit is the size above which the kubelet truncates a termination message.
	terminationLimit = 4096
)

// layoutAsHelp is the help of the flag --layout-as.
const layoutAsHelp = "known model type whose layout the checkpoint has, such as qwen3_moe (default: its own model_type)"

func newInspectCommand() *cobra.Command {
	var modelPath, layoutAs, dataset, messageFile string
	var expertParallelSize int
	cmd := &cobra.Command{
		Use:   "inspect --model-path DIR",
		Short: "Validate a checkpoint and a data set, and describe them as JSON",
		Long: "Validate a Hugging Face checkpoint of a Mixture-of-Experts model without loading weights, and optionally a data set, and\n" +
			"describe them as JSON on standard output and in the termination message. Exit codes: 3 the model, the data set or a flag\n" +
			"is invalid; 1 any other error, which a retry may fix. A model of an unknown type is valid: the report contains the reason why\n" +
			"no plan can be made for it.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			debug.SetMemoryLimit(headerMemory)
			report, err := inspect(modelPath, layoutAs, dataset, cmd.Flags().Changed("expert-parallel-size"), expertParallelSize)
			if err != nil {
				err = modelError{err}
				if writeErr := writeTerminationMessage(messageFile, oneLine(err.Error())); writeErr != nil {
					cli.PrintError(cmd.ErrOrStderr(), "semmoe", writeErr)
				}
				return err
			}
			if report.TiedEmbeddings && sglang.IgnoresTiedEmbeddings(report.Family) {
				fmt.Fprintf(cmd.ErrOrStderr(), "semmoe: warning: config.json ties the embeddings (tie_word_embeddings), and no tensor is named lm_head.weight. "+
					"SGLang ignores tied embeddings for %s: every logit is 0, and its health check passes. Add lm_head.weight as a tensor, or serve the model with another engine.\n", report.Family)
			}
			return printReport(cmd.OutOrStdout(), messageFile, report)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return modelError{checkpoint.Invalidf("%v", err)} })
	cmd.Flags().StringVar(&modelPath, "model-path", "", "directory of the checkpoint (required)")
	cmd.Flags().StringVar(&layoutAs, "layout-as", "", layoutAsHelp)
	cmd.Flags().StringVar(&dataset, "dataset", "", "JSONL file with a data set for profiling, to validate as well")
	cmd.Flags().IntVar(&expertParallelSize, "expert-parallel-size", 0, "number of ranks, validated as a divisor of the number of experts")
	cmd.Flags().StringVar(&messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return cmd
}

func inspect(modelPath, layoutAs, dataset string, checkSize bool, expertParallelSize int) (inspection.Report, error) {
	if modelPath == "" {
		return inspection.Report{}, checkpoint.Invalidf("--model-path is missing: set it to the directory of the checkpoint")
	}
	report, err := checkpoint.InspectAs(modelPath, layoutAs)
	if err == nil && checkSize {
		err = report.CheckExpertParallelSize(expertParallelSize)
	}
	if err != nil || dataset == "" {
		return inspection.Report{Report: report}, err
	}
	found, err := profile.InspectDataset(dataset)
	return inspection.Report{Report: report, Dataset: &found}, err
}

func printReport(out io.Writer, messageFile string, report inspection.Report) error {
	text, err := json.Marshal(report)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "%s\n", text); err != nil {
		return err
	}
	return writeTerminationMessage(messageFile, string(text))
}

// writeTerminationMessage writes in place: the kubelet bind-mounts the file, so a rename cannot replace it. Without a
// path it writes only if Kubernetes has provided the default file.
func writeTerminationMessage(path, message string) error {
	flags := os.O_WRONLY | os.O_TRUNC
	if path == "" {
		if _, err := os.Stat(terminationLog); err != nil {
			return nil
		}
		path = terminationLog
	} else {
		flags |= os.O_CREATE
	}
	if err := regularfile.Check(path); err != nil {
		return fmt.Errorf("termination message: %w", err)
	}
	file, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		return fmt.Errorf("termination message: %w", err)
	}
	if _, err := file.WriteString(message); err != nil {
		file.Close()
		return fmt.Errorf("termination message: %w", err)
	}
	return file.Close()
}

// oneLine returns a message on one line, limited to the size of a termination message.
func oneLine(message string) string {
	message = strings.Join(strings.Fields(message), " ")
	if len(message) > terminationLimit {
		message = strings.ToValidUTF8(message[:terminationLimit], "")
	}
	return message
}

// modelError adds the exit code that distinguishes invalid input (model, data set, flags) from read errors.
type modelError struct{ error }

func (e modelError) Unwrap() error { return e.error }

func (e modelError) ExitCode() int {
	var dataset *profile.DatasetError
	if checkpoint.IsInvalid(e.error) || errors.As(e.error, &dataset) {
		return exitInvalidModel
	}
	return 1
}
