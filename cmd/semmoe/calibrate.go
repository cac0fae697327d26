// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/calibration"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
)

// calibrateFlags are the flags of semmoe calibrate.
type calibrateFlags struct {
	spec                                                   calibration.Spec
	local, keep                                            bool
	out, configMap, output, fromLog, kubeconfig, inContext string
}

func newCalibrateCommand() *cobra.Command {
	var flags calibrateFlags
	command := &cobra.Command{
		Use:   "calibrate --image IMAGE --gpus N (--out FILE | --config-map NAME)",
		Short: "Measure exchanges, expert products and attention on GPUs",
		Long: `Measure the input of the cost models on the GPUs of a cluster. A Job runs a PyTorch script in the engine's image, under the restricted
pod security standard and without access to the cluster; it takes about a minute after the image is pulled. Its result is written
to a file, to a ConfigMap (key ` + calibration.ResultKey + `), or both, and the Job is deleted. A Job that has failed, or whose result
could not be written, is kept.

  semmoe calibrate --image lmsysorg/sglang:v0.5.12 --gpus 8 --out calibration.json
  semmoe calibrate --local --out calibration.json                          # on this machine, without cluster and image
  semmoe calibrate --image lmsysorg/sglang:v0.5.12 --gpus 8 -o yaml         # the manifest, to apply separately; then:
  kubectl logs job/semmoe-calibration | semmoe calibrate --from-log - --out calibration.json

docs/calibration.md describes the result. Exit codes: 2 the command line is invalid; 1 any other error.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCalibrate(cmd.Context(), flags, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	command.SetFlagErrorFunc(cli.FlagError)
	f := command.Flags()
	f.StringVar(&flags.spec.Image, "image", "", "image with Python and PyTorch, such as the engine's (required for a Job)")
	f.StringVar(&flags.spec.Python, "python", "python3", "Python interpreter in the image, or on this machine with --local")
	f.IntVar(&flags.spec.GPUs, "gpus", 0, "number of GPUs on one node (required for a Job; default with --local: all)")
	f.StringVar(&flags.spec.ResourceName, "resource-name", "nvidia.com/gpu", "resource name of the GPUs")
	f.StringVarP(&flags.spec.Namespace, "namespace", "n", "", "namespace of the Job (default: the namespace of the context)")
	f.StringVar(&flags.spec.Name, "name", "semmoe-calibration", "name of the Job and of the ConfigMap with its script")
	f.DurationVar(&flags.spec.Timeout, "timeout", time.Hour, "time limit of the Job, including the image pull")
	f.StringArrayVar(&flags.spec.Shapes, "shape", nil, "sizes of a further model to measure, as `hidden:intermediate:experts-per-rank:topk` (repeatable)")
	f.BoolVar(&flags.spec.HostTiming, "host-timing", false, "host timing, which includes the launch of each call, as in eager decoding")
	f.BoolVar(&flags.spec.Quick, "quick", false, "functional test with small sizes and three repetitions")
	f.StringToStringVar(&flags.spec.NodeSelector, "node-selector", nil, "labels of the nodes, as `key=value`")
	f.Lookup("node-selector").DefValue = ""
	f.StringSliceVar(&flags.spec.PullSecrets, "image-pull-secret", nil, "names of the image pull Secrets")
	f.BoolVar(&flags.local, "local", false, "measurement on this machine instead of in a Job")
	f.StringVar(&flags.fromLog, "from-log", "", "file with the log of a finished Job to read the result from; - is standard input")
	f.StringVarP(&flags.output, "output", "o", "", "output format of the manifest: yaml prints the Job and the ConfigMap without applying them")
	f.StringVar(&flags.out, "out", "", "output file for the result")
	f.StringVar(&flags.configMap, "config-map", "", "ConfigMap in the namespace for the result; an older result is replaced")
	f.BoolVar(&flags.keep, "keep", false, "no deletion of the finished Job")
	f.StringVar(&flags.kubeconfig, "kubeconfig", "", "path of the kubeconfig (default: $KUBECONFIG, ~/.kube/config, or the in-cluster configuration)")
	f.StringVar(&flags.inContext, "context", "", "context of the kubeconfig (default: the current context)")
	return command
}

// validate checks combinations of flags; Spec.Validate checks the requirements of a Job.
func (flags calibrateFlags) validate() error {
	manifest := flags.output != ""
	modes := 0
	for _, mode := range []bool{flags.local, flags.fromLog != "", manifest} {
		if mode {
			modes++
		}
	}
	switch {
	case modes > 1:
		return cli.UsageErrorf("--local, --from-log and --output are mutually exclusive")
	case manifest && flags.output != "yaml":
		return cli.UsageErrorf("--output is %q: want yaml", flags.output)
	case manifest && (flags.out != "" || flags.configMap != ""):
		return cli.UsageErrorf("--out and --config-map cannot be combined with --output yaml, which has no result: read the result later with --from-log")
	case !manifest && flags.out == "" && flags.configMap == "":
		return cli.UsageErrorf("--out, --config-map or both are required as destination of the result")
	case flags.local && flags.spec.GPUs < 0:
		return cli.UsageErrorf("--gpus is %d: want at least 1, or 0 for all", flags.spec.GPUs)
	case flags.configMap != "" && len(validation.IsDNS1123Subdomain(flags.configMap)) > 0:
		return cli.UsageErrorf("--config-map is %q: %s", flags.configMap, strings.Join(validation.IsDNS1123Subdomain(flags.configMap), "; "))
	case flags.local && flags.spec.Python == "":
		return cli.UsageErrorf("--python is empty; set it to an interpreter such as python3")
	case flags.local || flags.fromLog != "":
		return nil
	}
	spec := flags.spec
	spec.Namespace = cmp.Or(spec.Namespace, metav1.NamespaceDefault) // the namespace of the context is read later
	if err := spec.Validate(); err != nil {
		return cli.UsageErrorf("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// cluster returns the cluster of the kubeconfig, and the namespace of the Job.
func (flags calibrateFlags) cluster() (*calibration.Cluster, string, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = flags.kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: flags.inContext})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("failed to load the configuration of the cluster: %w", err)
	}
	namespace := flags.spec.Namespace
	if namespace == "" {
		if namespace, _, err = loader.Namespace(); err != nil {
			return nil, "", fmt.Errorf("failed to determine the namespace: %w", err)
		}
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, "", err
	}
	return &calibration.Cluster{Clients: clients, Poll: 2 * time.Second, Keep: flags.keep}, namespace, nil
}

func runCalibrate(ctx context.Context, flags calibrateFlags, in io.Reader, out, progress io.Writer) error {
	if err := flags.validate(); err != nil {
		return err
	}
	if flags.output != "" {
		return printManifest(flags.spec, out)
	}
	if flags.out != "" {
		if err := atomicfile.Check(flags.out); err != nil {
			return cli.UsageErrorf("--out: %w", err)
		}
	}
	var cluster *calibration.Cluster
	if flags.configMap != "" || !flags.local && flags.fromLog == "" {
		var err error
		if cluster, flags.spec.Namespace, err = flags.cluster(); err != nil {
			return err
		}
	}
	if flags.configMap != "" {
		if err := cluster.CheckStore(ctx, flags.spec.Namespace, flags.configMap); err != nil {
			return fmt.Errorf("--config-map: %w", err)
		}
	}
	var places []string
	result, err := measure(ctx, flags, cluster, in, progress, func(result *calibration.Result) (err error) {
		places, err = flags.write(ctx, cluster, result)
		return err
	})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%d x %s: %d measurements, %d skipped, in %s\n", result.World, result.GPU, result.Rows, result.Skipped, strings.Join(places, " and "))
	return err
}

// write writes a result to the destinations in the flags and returns their names. It writes the file first, so that an
// unavailable cluster does not lose the measurement.
func (flags calibrateFlags) write(ctx context.Context, cluster *calibration.Cluster, result *calibration.Result) (places []string, err error) {
	if flags.out != "" {
		if err := atomicfile.WriteBytes(flags.out, 0o644, append(result.JSON[:len(result.JSON):len(result.JSON)], '\n')); err != nil {
			return nil, err
		}
		places = append(places, flags.out)
	}
	if flags.configMap != "" {
		if err := cluster.Store(ctx, flags.spec.Namespace, flags.configMap, result); err != nil {
			return nil, fmt.Errorf("failed to write the result: %w", err)
		}
		places = append(places, "ConfigMap "+flags.spec.Namespace+"/"+flags.configMap)
	}
	return places, nil
}

func printManifest(spec calibration.Spec, out io.Writer) error {
	spec.Namespace = cmp.Or(spec.Namespace, metav1.NamespaceDefault)
	manifest, err := calibration.Manifest(spec)
	if err != nil {
		return err
	}
	_, err = out.Write(manifest)
	return err
}

// measure obtains a result in the way selected by the flags, and writes it.
func measure(ctx context.Context, flags calibrateFlags, cluster *calibration.Cluster, in io.Reader, progress io.Writer, write func(*calibration.Result) error) (result *calibration.Result, err error) {
	report := calibrationProgress(progress)
	switch {
	case flags.fromLog == "-":
		result, err = calibration.Read(in, report)
	case flags.fromLog != "":
		result, err = readCalibrationLog(flags.fromLog, report)
	case flags.local:
		result, err = calibration.RunLocal(ctx, flags.spec.Python, flags.spec.Args(), progress, report)
	default:
		return cluster.Run(ctx, flags.spec, report, write)
	}
	if err != nil {
		return nil, err
	}
	return result, write(result)
}

func readCalibrationLog(path string, report func(calibration.Event)) (*calibration.Result, error) {
	log, err := regularfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return calibration.Read(log, report)
}

// calibrationProgress prints a line for each new section, and for each skipped measurement and wait.
func calibrationProgress(w io.Writer) func(calibration.Event) {
	section := ""
	return func(event calibration.Event) {
		switch {
		case event.Event == "start":
			fmt.Fprintf(w, "%d measurements on %d x %s\n", event.Measurements, event.World, event.GPU)
		case event.Event == "waiting":
			fmt.Fprintf(w, "waiting: %s\n", event.Message)
		case event.Event == "skipped":
			fmt.Fprintf(w, "%d/%d %s skipped: %s\n", event.Done, event.Total, event.Section, event.Reason)
		case event.Section != section:
			section = event.Section
			fmt.Fprintf(w, "%d/%d %s\n", event.Done, event.Total, section)
		}
	}
}
