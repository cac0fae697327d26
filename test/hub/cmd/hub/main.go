// SPDX-License-Identifier: Apache-2.0

// Command hub serves directories as repositories of the test double of the Hugging Face hub.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/semmoe/operator/test/hub"
)

// commit is the commit of all repositories.
const commit = "0123456789abcdef0123456789abcdef01234567"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "hub:", err)
		os.Exit(1)
	}
}

func run() error {
	listen := flag.String("listen", "127.0.0.1:8080", "address of the hub")
	contents := flag.String("contents", "127.0.0.1:8081", "address of the host with the contents of files in LFS")
	contentURL := flag.String("content-url", "", "URL by which clients reach --contents (default: http:// and its address)")
	token := flag.String("token", "", "token of an account that may read gated repositories")
	gated := flag.Bool("gated", false, "repositories are gated")
	stall := flag.Bool("stall-once", false, "the first response with the content of each file in LFS stops halfway, until the client leaves")
	flag.Parse()
	server := &hub.Server{
		Repos: map[string]*hub.Repo{}, Accounts: map[string]hub.Account{*token: {Accepted: true}}, PageSize: 3,
		ContentURL: cmp.Or(*contentURL, "http://"+*contents), StallOnce: *stall,
	}
	for _, argument := range flag.Args() {
		name, dir, found := strings.Cut(argument, "=")
		if !found {
			return fmt.Errorf("%q is not a repository: ORGANIZATION/NAME=DIRECTORY is required", argument)
		}
		repo := hub.NewRepo(commit)
		repo.Gated = *gated
		if err := hub.AddDirectory(repo, dir); err != nil {
			return err
		}
		server.Repos[name] = repo
	}
	failed := make(chan error)
	for address, handler := range map[string]http.Handler{*listen: server, *contents: server.Contents()} {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		fmt.Printf("listening on %s\n", listener.Addr())
		go func() {
			failed <- (&http.Server{Handler: logged(handler), ReadHeaderTimeout: time.Minute}).Serve(listener)
		}()
	}
	return <-failed
}

// logged prints each request.
func logged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.Method, r.Host, r.URL.Path, r.Header.Get("Range"))
		next.ServeHTTP(w, r)
	})
}
