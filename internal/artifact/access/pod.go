package access

import (
	"fmt"
	"os"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

// FromPod returns a client for a process in a pod with Env and TokenVolume.
func FromPod(retryFor time.Duration) (*artifact.Client, error) {
	url, ca := os.Getenv(URLVariable), os.Getenv(CAVariable)
	if url == "" || ca == "" {
		return nil, fmt.Errorf("the environment variables %s and %s of the artifact store are not set", URLVariable, CAVariable)
	}
	return artifact.NewClient(artifact.Config{URL: url, CA: []byte(ca), TokenFile: TokenFile, RetryFor: retryFor})
}
