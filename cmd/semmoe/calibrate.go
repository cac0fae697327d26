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

	"github.com/semmoe/operator/internal/calibration"
	"github.com/semmoe/operator/internal/regularfile"
	"github.com/semmoe/operator/internal/wholefile"
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
		Short: "Measure exchanges, expert products and attention on your own GPUs",
		Long: `Measure, on your own GPUs, what the cost models are fitted to. A Job runs a PyTorch script in the engine's image, under the restricted
pod security standard and without any access to the cluster; it takes about a minute once the image is there. Its result is written
to a file, to a ConfigMap (key ` + calibration.ResultKey + `), or both, and the Job is deleted; one that has failed, or whose result
could not be written, is kept.

  semmoe calibrate --image lmsysorg/sglang:latest --gpus 8 --out calibration.json
  semmoe calibrate --local --out calibration.json                          # on this machine: no cluster, no image
  semmoe calibrate --image lmsysorg/sglang:latest --gpus 8 -o yaml         # the manifest, to apply in another way; then:
  kubectl logs job/semmoe-calibration | semmoe calibrate --from-log - --out calibration.json

docs/calibration.md describes the result. Exit code 2: a flag is wrong.`,
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCalibrate(cmd.Context(), flags, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := command.Flags()
	f.StringVar(&flags.spec.Image, "image", "", "image with Python and PyTorch: the engine's (required for a Job)")
	f.StringVar(&flags.spec.Python, "python", "python3", "Python interpreter in the image, or on this machine with --local")
	f.IntVar(&flags.spec.GPUs, "gpus", 0, "GPUs of one node to measure on (required for a Job; default with --local: all)")
	f.StringVar(&flags.spec.ResourceName, "resource-name", "nvidia.com/gpu", "resource by which the GPUs are asked for")
	f.StringVarP(&flags.spec.Namespace, "namespace", "n", "", "namespace of the Job (default: that of the context)")
	f.StringVar(&flags.spec.Name, "name", "semmoe-calibration", "name of the Job and of the ConfigMap with its script")
	f.DurationVar(&flags.spec.Timeout, "timeout", time.Hour, "how long the Job may take, the time to pull the image included")
	f.StringArrayVar(&flags.spec.Shapes, "shape", nil, "sizes of a further model to measure, as `hidden:intermediate:experts-per-rank:topk` (repeatable)")
	f.BoolVar(&flags.spec.HostTiming, "host-timing", false, "let the clock cover the launch of each call, as in eager decoding")
	f.BoolVar(&flags.spec.Quick, "quick", false, "small sizes and three repetitions: shows that it works")
	f.StringToStringVar(&flags.spec.NodeSelector, "node-selector", nil, "labels of the nodes to measure on, as `key=value`")
	f.Lookup("node-selector").DefValue = ""
	f.StringSliceVar(&flags.spec.PullSecrets, "image-pull-secret", nil, "names of Secrets with which the image is pulled")
	f.BoolVar(&flags.local, "local", false, "run the script on this machine instead of in a Job")
	f.StringVar(&flags.fromLog, "from-log", "", "read the result from the log of a Job that has run, in this file; - is standard input")
	f.StringVarP(&flags.output, "output", "o", "", "yaml: print the Job and the ConfigMap, and do nothing else")
	f.StringVar(&flags.out, "out", "", "file to write the result to")
	f.StringVar(&flags.configMap, "config-map", "", "ConfigMap of the namespace to write the result to; an older result in it is replaced")
	f.BoolVar(&flags.keep, "keep", false, "keep the Job when it is done")
	f.StringVar(&flags.kubeconfig, "kubeconfig", "", "kubeconfig to use (default: $KUBECONFIG, ~/.kube/config, or the pod's own)")
	f.StringVar(&flags.inContext, "context", "", "context of the kubeconfig to use (default: its current one)")
	return command
}

// validate checks how the flags go together; Spec.Validate checks what a Job needs.
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
		return usageErrorf("give at most one of --local, --from-log and --output")
	case manifest && flags.output != "yaml":
		return usageErrorf("--output is %q: want yaml", flags.output)
	case manifest && (flags.out != "" || flags.configMap != ""):
		return usageErrorf("--out and --config-map take a result, and --output yaml has none: read it later with --from-log")
	case !manifest && flags.out == "" && flags.configMap == "":
		return usageErrorf("give --out, --config-map or both: where the result is written")
	case flags.local && flags.spec.GPUs < 0:
		return usageErrorf("--gpus is %d: want at least 1, or 0 for all", flags.spec.GPUs)
	case flags.configMap != "" && len(validation.IsDNS1123Subdomain(flags.configMap)) > 0:
		return usageErrorf("--config-map is %q: %s", flags.configMap, strings.Join(validation.IsDNS1123Subdomain(flags.configMap), "; "))
	case flags.local && flags.spec.Python == "":
		return usageErrorf("--python is empty: name the interpreter, such as python3")
	case flags.local || flags.fromLog != "":
		return nil
	}
	spec := flags.spec
	spec.Namespace = cmp.Or(spec.Namespace, metav1.NamespaceDefault) // the context's is known later
	if err := spec.Validate(); err != nil {
		return usageErrorf("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// cluster is a cluster's, and the namespace that is meant.
func (flags calibrateFlags) cluster() (*calibration.Cluster, string, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = flags.kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: flags.inContext})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("find the cluster: %w", err)
	}
	namespace := flags.spec.Namespace
	if namespace == "" {
		if namespace, _, err = loader.Namespace(); err != nil {
			return nil, "", fmt.Errorf("find the namespace: %w", err)
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
		if err := wholefile.Check(flags.out); err != nil {
			return usageErrorf("--out: %w", err)
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
	_, err = fmt.Fprintf(out, "%d x %s: %d measurements, %d left out, in %s\n", result.World, result.GPU, result.Rows, result.Skipped, strings.Join(places, " and "))
	return err
}

// write writes a result to the places that the flags name, and returns them. The file comes first: a cluster that is away does not cost the
// measurement.
func (flags calibrateFlags) write(ctx context.Context, cluster *calibration.Cluster, result *calibration.Result) (places []string, err error) {
	if flags.out != "" {
		if err := wholefile.WriteBytes(flags.out, 0o644, append(result.JSON[:len(result.JSON):len(result.JSON)], '\n')); err != nil {
			return nil, err
		}
		places = append(places, flags.out)
	}
	if flags.configMap != "" {
		if err := cluster.Store(ctx, flags.spec.Namespace, flags.configMap, result); err != nil {
			return nil, fmt.Errorf("write the result: %w", err)
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

// measure gets a result in the way that the flags ask for, and writes it.
func measure(ctx context.Context, flags calibrateFlags, cluster *calibration.Cluster, in io.Reader, progress io.Writer, write func(*calibration.Result) error) (result *calibration.Result, err error) {
	tell := calibrationProgress(progress)
	switch {
	case flags.fromLog == "-":
		result, err = calibration.Read(in, tell)
	case flags.fromLog != "":
		result, err = readCalibrationLog(flags.fromLog, tell)
	case flags.local:
		result, err = calibration.RunLocal(ctx, flags.spec.Python, flags.spec.Args(), progress, tell)
	default:
		return cluster.Run(ctx, flags.spec, tell, write)
	}
	if err != nil {
		return nil, err
	}
	return result, write(result)
}

func readCalibrationLog(path string, tell func(calibration.Event)) (*calibration.Result, error) {
	log, err := regularfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return calibration.Read(log, tell)
}

// calibrationProgress writes a line for each section that is begun, and for all that is left out or waited for.
func calibrationProgress(w io.Writer) func(calibration.Event) {
	section := ""
	return func(event calibration.Event) {
		switch {
		case event.Event == "start":
			fmt.Fprintf(w, "%d measurements on %d x %s\n", event.Measurements, event.World, event.GPU)
		case event.Event == "waiting":
			fmt.Fprintf(w, "waiting: %s\n", event.Message)
		case event.Event == "skipped":
			fmt.Fprintf(w, "%d/%d %s left out: %s\n", event.Done, event.Total, event.Section, event.Reason)
		case event.Section != section:
			section = event.Section
			fmt.Fprintf(w, "%d/%d %s\n", event.Done, event.Total, section)
		}
	}
}
