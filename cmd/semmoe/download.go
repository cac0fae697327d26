// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/model/hub"
	"github.com/semmoe/operator/internal/model/hub/report"
)

// downloadMemory is the soft memory limit of the garbage collector: buffers, and the list of files.
const downloadMemory = 128 << 20

// downloadFlags are the flags of semmoe download.
type downloadFlags struct {
	hub.Options
	endpoint, progressAddress, messageFile string
}

func newDownloadCommand() *cobra.Command {
	var flags downloadFlags
	command := &cobra.Command{
		Use:   "download --repo NAME --out DIR",
		Short: "Download a checkpoint from the Hugging Face hub, or a server with its API",
		Long: "Download a revision of a repository into a new directory, and verify the digest of each file. The directory appears when it is complete.\n" +
			"A run after a kill or an interruption resumes; a run with the same repository and revision finds the directory and sends no request.\n" +
			"Files that engines do not need are not downloaded: hidden files, media, and weights in other formats than safetensors. The variable\n" +
			"HF_TOKEN may contain an access token. Prints one JSON object, which is also the termination message; an error is one line there.\n" +
			"Exit codes: 2 the command line is invalid; 3 the repository, the revision, the token or the directory cannot be used;\n" +
			"1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			result, err := flags.run(cmd)
			if err != nil {
				if writeErr := writeTerminationMessage(flags.messageFile, oneLine(err.Error())); writeErr != nil {
					cli.PrintError(cmd.ErrOrStderr(), "semmoe", writeErr)
				}
				return err
			}
			text, err := json.Marshal(result)
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s\n", text); err != nil {
				return err
			}
			return writeTerminationMessage(flags.messageFile, string(text))
		},
	}
	command.SetFlagErrorFunc(cli.FlagError)
	f := command.Flags()
	f.StringVar(&flags.Repo, "repo", "", "name of the repository, such as Qwen/Qwen3-30B-A3B (required)")
	f.StringVar(&flags.Revision, "revision", "main", "branch, tag or commit")
	f.StringVar(&flags.Out, "out", "", "output directory: new, empty, or with the same download (required)")
	f.StringVar(&flags.endpoint, "endpoint", hub.DefaultEndpoint, "address of the server")
	f.IntVar(&flags.Connections, "connections", hub.DefaultConnections, "number of files that are downloaded concurrently, 1 to 32")
	f.StringVar(&flags.progressAddress, "progress-address", "", "host:port of the progress endpoint GET "+report.ProgressPath+" (default: disabled)")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

func (f *downloadFlags) run(cmd *cobra.Command) (*report.Result, error) {
	for _, flag := range []struct{ name, value string }{{"repo", f.Repo}, {"revision", f.Revision}, {"out", f.Out}} {
		if flag.value == "" {
			return nil, cli.UsageErrorf("--%s is missing", flag.name)
		}
	}
	if f.Connections < 1 || f.Connections > 32 {
		return nil, cli.UsageErrorf("--connections is %d; it must be 1 to 32", f.Connections)
	}
	out, err := filepath.Abs(f.Out)
	if err != nil {
		return nil, err
	}
	debug.SetMemoryLimit(downloadMemory)
	client, err := hub.NewClient(f.endpoint, os.Getenv("HF_TOKEN"))
	if err != nil {
		return nil, cli.UsageErrorf("--endpoint: %v", err)
	}
	progress := &hub.Progress{}
	if f.progressAddress != "" {
		stop, err := serveProgress(joinIP(f.progressAddress), progress)
		if err != nil {
			return nil, err
		}
		defer stop()
	}
	options := f.Options
	options.Out = out
	result, err := hub.Run(cli.WithLogger(cmd.Context(), "download", 0), client, options, progress)
	var invalid *hub.InvalidError
	if errors.As(err, &invalid) {
		return nil, cli.WithCode(err, cli.ExitInvalidFile)
	}
	return result, err
}
